"""The kernels of mamba2, forward and backward, beside chunk_scan.

With a the sum of A dt within a chunk, state_t = exp(A dt_t) state_(t-1) + dt_t x_t B_t^T and y_t = state_t C_t + D x_t.

Forward: a; C B^T of each chunk; a walk over the steps, which leaves the state before each chunk; chunk_scan.
Backward, in chunks of 64 steps: the gradient of the state after step t is itself a decaying state, fed with dy_t C_t^T from the
end, so a second walk leaves the gradient G of the state after each chunk.  With E_ts = exp(a_t - a_s) for s <= t, CB = C B^T
and dCB = (dy x^T) E dt_s, one kernel then has for each chunk
    dx = (CB E dt)^T dy + dt exp(a_last - a) (B G^T) + D dy,
    dC = dCB B + exp(a) (dy before),        dB = dCB^T C + dt exp(a_last - a) (x G).
A pair (t, s) depends on a_t - a_s: the sums of its rows and columns are the gradients of a.  A dt_t is in a_t and all later
ones: a sum from the end of the chunk, and beyond it the sum of G * (state after the chunk).  A block goes over some heads of a
group, one after another, and keeps their dB and dC: no atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from ..attention.form import LOG2E

STEPS = 64  # of a tile; of a chunk of backward, where a block has room for it


class MambaForm(NamedTuple):
    """What a kernel is compiled for.  length: steps of a chunk.  slices: blocks that share the heads of a group.  skip: whether
    there is a D.  pieces: in which a block of the gradients loads states, columns after another."""

    heads: int
    groups: int
    p: int
    n: int
    length: int
    dtype: str
    slices: int = 1
    skip: bool = True
    pieces: int = 1

    @property
    def columns(self) -> int:
        """Of a piece of a state."""
        return self.n // self.pieces

    def of_piece(self, m: int) -> slice:
        return slice(m * self.columns, (m + 1) * self.columns)

    def piece(self, x: Any, m: int) -> Any:
        """These columns of a tile of all."""
        return x if self.pieces == 1 else x[:, self.of_piece(m)]

    @property
    def acc(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def each(self) -> int:
        return self.heads // self.groups

    def exp(self, x: Any) -> Any:
        return T.exp(x) if self.acc == "float64" else T.exp2(x * LOG2E)


def cumulate(f: MambaForm) -> Any:
    """The kernel (dt, A, dt by chunks, a): dt (batch, seq, heads) to (batch, heads, chunks, length), 0 behind the sequence."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    rows = batch, f.heads, chunks, f.length

    @T.prim_func
    def mamba_cumsum(Steps: T.Tensor((batch, seq, f.heads), f.acc), A: T.Tensor((f.heads,), f.acc),
                   Dt: T.Tensor(rows, f.acc), Cumsum: T.Tensor(rows, f.acc)):
        with T.Kernel(chunks, f.heads, batch, threads=64) as (c, h, b):
            s = T.alloc_shared((f.length,), f.acc)
            for i in T.Parallel(f.length):
                s[i] = T.if_then_else(c * f.length + i < seq, Steps[b, c * f.length + i, h], T.cast(0, f.acc))
            T.copy(s, Dt[b, h, c, :])
            for i in T.Parallel(f.length):
                s[i] *= A[h]
            T.cumsum(s, dim=0)
            T.copy(s, Cumsum[b, h, c, :])

    return mamba_cumsum


def scores(f: MambaForm) -> Any:
    """The kernel (C, B, CB): c b^T of each chunk, tiles on and below the diagonal."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    rows = batch, seq, f.groups, f.n

    @T.prim_func
    def mamba_scores(C: T.Tensor(rows, f.dtype), B: T.Tensor(rows, f.dtype),
                       CB: T.Tensor((batch, chunks, f.groups, f.length, f.length), f.dtype)):
        with T.Kernel(f.length // STEPS, f.length // STEPS, batch * chunks * f.groups, threads=128) as (j, i, z):
            Cs, Bs = T.alloc_shared((STEPS, f.n), f.dtype), T.alloc_shared((STEPS, f.n), f.dtype)
            found = T.alloc_fragment((STEPS, STEPS), f.acc)
            g, c, b = z % f.groups, z // f.groups % chunks, z // f.groups // chunks
            t, s = c * f.length + i * STEPS, c * f.length + j * STEPS
            if j <= i:
                T.copy(C[b, t:t + STEPS, g, :], Cs)
                T.copy(B[b, s:s + STEPS, g, :], Bs)
                T.gemm(Cs, Bs, found, transpose_B=True, clear_accum=True)
                T.copy(found, CB[b, c, g, i * STEPS:(i + 1) * STEPS, j * STEPS:(j + 1) * STEPS])

    return mamba_scores


@T.macro
def walk_over(f, back, columns, stages, inputs, results, at):
    """The states before all chunks, or, back, from the end to the start, with dy and C in place of x and B, the gradients of
    the states after them: first the gradient of the last state, last that of the state before all steps."""
    (X, B, Dt, A, First), (States, Last), (chunks, v, h, b) = inputs, results, at
    steps = min(STEPS, f.length)
    Xs, Bs = T.alloc_shared((steps, f.p), f.dtype), T.alloc_shared((steps, columns), f.dtype)
    a_s, d_s, weight = (T.alloc_shared((steps,), f.acc) for _ in (0, 1, 2))
    Xw, per = T.alloc_fragment((f.p, steps), f.dtype), f.length // steps
    state, begin, end = (T.alloc_fragment(x, f.acc) for x in ((f.p, columns), (1,), (1,)))
    T.copy(First[b, h, :, v * columns:(v + 1) * columns], state)
    T.clear(end)
    for step in T.Pipelined(chunks * per, num_stages=stages):
        tile = chunks * per - 1 - step if back else step
        c, at_step = tile // per, tile % per * steps
        T.copy(X[b, tile * steps:(tile + 1) * steps, h, :], Xs)
        T.copy(B[b, tile * steps:(tile + 1) * steps, h // f.each, v * columns:(v + 1) * columns], Bs)
        T.copy(A[b, h, c, at_step:at_step + steps], a_s)
        if not back:
            T.copy(Dt[b, h, c, at_step:at_step + steps], d_s)
        if step % per == 0:
            T.copy(state, States[b, c, h, :, v * columns:(v + 1) * columns])
        begin[0] = T.if_then_else(at_step > 0, end[0], T.cast(0, f.acc))
        end[0] = a_s[steps - 1]
        for i in T.Parallel(steps):
            weight[i] = f.exp(a_s[i] - begin[0]) if back else f.exp(a_s[steps - 1] - a_s[i]) * d_s[i]
        for i, j in T.Parallel(f.p, steps):
            Xw[i, j] = Xs[j, i] * weight[j]
        for i, j in T.Parallel(f.p, columns):
            state[i, j] *= f.exp(end[0] - begin[0])
        T.gemm(Xw, Bs, state)
    T.copy(state, Last[b, h, :, v * columns:(v + 1) * columns])


def walk(f: MambaForm, columns: int) -> Any:
    """The kernel (x, B, dt, a, first, states, last): the state before each chunk; last, the one after all.  columns: of a
    state, of a block."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    rows, state = (batch, f.heads, chunks, f.length), (batch, f.heads, f.p, f.n)

    @T.prim_func
    def mamba_walk(X: T.Tensor((batch, seq, f.heads, f.p), f.dtype), B: T.Tensor((batch, seq, f.groups, f.n), f.dtype),
                   Dt: T.Tensor(rows, f.acc), A: T.Tensor(rows, f.acc), First: T.Tensor(state, f.acc),
                   States: T.Tensor((batch, chunks, f.heads, f.p, f.n), f.dtype), Last: T.Tensor(state, f.acc)):
        with T.Kernel(f.n // columns, f.heads, batch, threads=128) as (v, h, b):
            walk_over(f, False, columns, 3, (X, B, Dt, A, First), (States, Last), (chunks, v, h, b))

    return mamba_walk


def walks(f: MambaForm, columns: int) -> Any:
    """The kernel (x, B, dt, a, first, before, dy, C, final, after, dfirst, last): the walk, and the one back, at the same time;
    chunks have 64 steps at most."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    rows, state = (batch, f.heads, chunks, f.length), (batch, f.heads, f.p, f.n)
    x, bc, states = (batch, seq, f.heads, f.p), (batch, seq, f.groups, f.n), (batch, chunks, f.heads, f.p, f.n)

    @T.prim_func
    def mamba_walks(X: T.Tensor(x, f.dtype), B: T.Tensor(bc, f.dtype), Dt: T.Tensor(rows, f.acc), A: T.Tensor(rows, f.acc),
                    First: T.Tensor(state, f.acc), Before: T.Tensor(states, f.dtype), dY: T.Tensor(x, f.dtype),
                    C: T.Tensor(bc, f.dtype), Final: T.Tensor(state, f.acc), After: T.Tensor(states, f.dtype),
                    dFirst: T.Tensor(state, f.acc), Last: T.Tensor(state, f.acc)):
        with T.Kernel(f.n // columns, f.heads, 2 * batch, threads=128) as (v, h, z):
            if z < batch:
                walk_over(f, False, columns, 2, (X, B, Dt, A, First), (Before, Last), (chunks, v, h, z))
            else:
                walk_over(f, True, columns, 2, (dY, C, Dt, A, Final), (After, dFirst), (chunks, v, h, z - batch))

    return mamba_walks


@T.macro
def of_pairs(f, tiles, CB, operands, grads, row, column):
    """What pairs of steps of the chunk give to dB and dC, their weights in tiles.W, and the sums of their rows and columns."""
    (Cs, Bs), (dB, dC), pairs = operands, grads, T.alloc_fragment((f.length, f.length), f.acc)
    T.gemm(tiles.dy, tiles.x, pairs, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(f.length, f.length):
        decay = T.if_then_else(j <= i, f.exp(T.min(tiles.a[i] - tiles.a[j], T.cast(0, f.acc))), T.cast(0, f.acc))
        tiles.W[i, j] = CB[i, j] * (decay * tiles.dt[j])
        pairs[i, j] *= decay
    for i, j in T.Parallel(f.length, f.length):
        tiles.dCB[i, j] = pairs[i, j] * tiles.dt[j]
        pairs[i, j] *= CB[i, j]
    T.reduce_sum(pairs, column, dim=0)
    for i, j in T.Parallel(f.length, f.length):
        pairs[i, j] *= tiles.dt[j]
    T.reduce_sum(pairs, row, dim=1)
    _ = [T.gemm(tiles.dCB, f.piece(Bs, m), x) for m, x in enumerate(dC)]
    _ = [T.gemm(tiles.dCB, f.piece(Cs, m), x, transpose_A=True) for m, x in enumerate(dB)]


@T.macro
def load(f, tile, States, at, m):
    """A piece of a state, where a block has no room for all."""
    if f.pieces > 1:
        b, c, h = at
        T.copy(States[b, c, h, :, f.of_piece(m)], tile)


@T.macro
def of_piece_before(f, tiles, Cs, dC, read, Before, at, m):
    """What a piece of the state before the chunk gives to its columns of dC, and to what C reads."""
    load(f, tiles.S, Before, at, m)
    T.gemm(tiles.scaled, tiles.S, dC[m])
    T.gemm(f.piece(Cs, m), tiles.S, read, transpose_B=True, clear_accum=m == 0)


@T.macro
def of_state_before(f, tiles, Cs, dC, row, Before, at):
    """What the state before the chunk gives to dC, and to `row`."""
    read, each = T.alloc_fragment((f.length, f.p), f.acc), T.alloc_fragment((f.length,), f.acc)
    for i, j in T.Parallel(f.length, f.p):
        tiles.scaled[i, j] = tiles.dy[i, j] * f.exp(tiles.a[i])
    _ = [of_piece_before(f, tiles, Cs, dC, read, Before, at, m) for m in range(f.pieces)]
    for i, j in T.Parallel(f.length, f.p):
        read[i, j] *= tiles.dy[i, j] * f.exp(tiles.a[i])
    T.reduce_sum(read, each, dim=1)
    for i in T.Parallel(f.length):
        row[i] += each[i]


@T.macro
def read_piece(f, tiles, Bs, dx, After, at, m):
    """What B reads of a piece of the state after the chunk."""
    load(f, tiles.G, After, at, m)
    T.gemm(f.piece(Bs, m), tiles.G, dx, transpose_B=True, clear_accum=m == 0)


@T.macro
def write_piece(f, tiles, dB, After, at, m):
    """What it gives to its columns of dB."""
    load(f, tiles.G, After, at, m)
    T.gemm(tiles.scaled, tiles.G, dB[m])


@T.macro
def of_state_after(f, tiles, Bs, dB, dx, written, After, at):
    """What the state after the chunk gives to dB, dx, and to the gradient of dt beside x."""
    each, last = T.alloc_fragment((f.length, f.p), f.acc), f.length - 1
    _ = [read_piece(f, tiles, Bs, dx, After, at, m) for m in range(f.pieces)]
    for i, j in T.Parallel(f.length, f.p):
        dx[i, j] *= f.exp(tiles.a[last] - tiles.a[i])
        each[i, j] = dx[i, j] * tiles.x[i, j]
        dx[i, j] *= tiles.dt[i]
    T.reduce_sum(each, written, dim=1)
    T.gemm(tiles.W, tiles.dy, dx, transpose_A=True)
    for i, j in T.Parallel(f.length, f.p):
        tiles.scaled[i, j] = tiles.x[i, j] * f.exp(tiles.a[last] - tiles.a[i]) * tiles.dt[i]
    _ = [write_piece(f, tiles, dB, After, at, m) for m in range(f.pieces)]


@T.macro
def of_both(f, tiles, edges, states, at, m):
    """The rows of S * G times the decay of the chunk."""
    both = T.alloc_fragment((f.p, f.columns), f.acc)
    load(f, tiles.S, states[0], at, m)
    load(f, tiles.G, states[1], at, m)
    for i, j in T.Parallel(f.p, f.columns):
        both[i, j] = T.cast(tiles.S[i, j], f.acc) * tiles.G[i, j] * f.exp(tiles.a[f.length - 1])
    T.reduce_sum(both, edges, dim=1, clear=m == 0)


@T.macro
def of_steps(f, tiles, A, row, column, written, states, results, at):
    """The gradients of dt, and this chunk's of A and D."""
    (dDt, dA, dD), (b, c, h, t, seq) = results, at
    edges, total = T.alloc_fragment((f.p,), f.acc), T.alloc_fragment((1,), f.acc)
    product, each = T.alloc_fragment((f.length, f.p), f.acc), T.alloc_fragment((f.length,), f.acc)
    _ = [of_both(f, tiles, edges, states, (b, c, h), m) for m in range(f.pieces)]
    T.reduce_sum(edges, total)
    for i in T.Parallel(f.length):
        each[i] = tiles.dt[i] * written[i]
    T.reduce_sum(each, total, clear=False)
    T.copy(total, tiles.edge)
    for i in T.Parallel(f.length):
        column[i] += written[i]
    for i in T.Parallel(f.length):
        tiles.steps[i] = row[i] - tiles.dt[i] * column[i]
    T.cumsum(tiles.steps, dim=0, reverse=True)
    for i in T.Parallel(f.length):
        each[i] = tiles.steps[i] + tiles.edge[0]
    for i in T.Parallel(f.length):
        if t + i < seq:
            dDt[b, t + i, h] = A[h] * each[i] + column[i]
    for i in T.Parallel(f.length):
        each[i] *= tiles.dt[i]
    T.reduce_sum(each, total)
    for i in T.Parallel(1):
        dA[b, c, h] = total[i]
    if f.skip:
        for i, j in T.Parallel(f.length, f.p):
            product[i, j] = T.cast(tiles.x[i, j], f.acc) * tiles.dy[i, j]
        T.reduce_sum(product, each, dim=1)
        T.reduce_sum(each, total)
        for i in T.Parallel(1):
            dD[b, c, h] = total[i]


class Tiles(NamedTuple):
    """In shared memory: of a head and a chunk x, dy, a, dt, the states S before and G after; operands that threads
    make; steps, edge: the gradient of a, and what all its entries have from later chunks."""

    x: Any
    dy: Any
    scaled: Any
    S: Any
    G: Any
    W: Any
    dCB: Any
    a: Any
    dt: Any
    steps: Any
    edge: Any

    @staticmethod
    def of(f: MambaForm) -> Tiles:
        shapes = [(f.length, f.p)] * 3 + [(f.p, f.columns)] * 2 + [(f.length, f.length)] * 2
        rows = [(f.length,)] * 3 + [(1,)]
        return Tiles(*(T.alloc_shared(x, f.dtype) for x in shapes), *(T.alloc_shared(x, f.acc) for x in rows))


def gradients(f: MambaForm) -> Any:
    """The kernel (x, A, B, C, D, dt, a, before, after, dy, dx, ddt, dA, dD of chunks, dB, dC of slices of heads)."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    x, bc, rows = (batch, seq, f.heads, f.p), (batch, seq, f.groups, f.n), (batch, f.heads, chunks, f.length)
    states, slices, of_chunks = (batch, chunks, f.heads, f.p, f.n), (f.slices, *bc), (batch, chunks, f.heads)
    few = f.each // f.slices

    @T.prim_func
    def mamba_gradients(X: T.Tensor(x, f.dtype), A: T.Tensor((f.heads,), f.acc), B: T.Tensor(bc, f.dtype),
                        C: T.Tensor(bc, f.dtype), D: T.Tensor((f.heads,), f.acc), Dt: T.Tensor(rows, f.acc),
                        Cumsum: T.Tensor(rows, f.acc), Before: T.Tensor(states, f.dtype), After: T.Tensor(states, f.dtype),
                        dY: T.Tensor(x, f.dtype), dX: T.Tensor(x, f.dtype), dDt: T.Tensor((batch, seq, f.heads), f.acc),
                        dA: T.Tensor(of_chunks, f.acc), dD: T.Tensor(of_chunks, f.acc), dB: T.Tensor(slices, f.acc),
                        dC: T.Tensor(slices, f.acc)):
        with T.Kernel(chunks, f.groups * f.slices, batch, threads=256) as (c, z, b):
            tiles, t, g = Tiles.of(f), c * f.length, z // f.slices
            Bs, Cs = T.alloc_shared((f.length, f.n), f.dtype), T.alloc_shared((f.length, f.n), f.dtype)
            CB, dx = T.alloc_fragment((f.length, f.length), f.acc), T.alloc_fragment((f.length, f.p), f.acc)
            db, dc = ([T.alloc_fragment((f.length, f.columns), f.acc) for _ in range(f.pieces)] for _ in (0, 1))
            row, column, written = (T.alloc_fragment((f.length,), f.acc) for _ in (0, 1, 2))
            T.copy(B[b, t:t + f.length, g, :], Bs)
            T.copy(C[b, t:t + f.length, g, :], Cs)
            T.gemm(Cs, Bs, CB, transpose_B=True, clear_accum=True)
            _ = [T.clear(y) for y in (*db, *dc)]
            for k in T.serial(few):
                h = g * f.each + z % f.slices * few + k
                T.copy(X[b, t:t + f.length, h, :], tiles.x)
                T.copy(dY[b, t:t + f.length, h, :], tiles.dy)
                if f.pieces == 1:
                    T.copy(Before[b, c, h, :, :], tiles.S)
                    T.copy(After[b, c, h, :, :], tiles.G)
                T.copy(Cumsum[b, h, c, :], tiles.a)
                T.copy(Dt[b, h, c, :], tiles.dt)
                of_pairs(f, tiles, CB, (Cs, Bs), (db, dc), row, column)
                of_state_before(f, tiles, Cs, dc, row, Before, (b, c, h))
                of_state_after(f, tiles, Bs, db, dx, written, After, (b, c, h))
                if f.skip:
                    for i, j in T.Parallel(f.length, f.p):
                        dx[i, j] += D[h] * tiles.dy[i, j]
                T.copy(dx, dX[b, t:t + f.length, h, :])
                of_steps(f, tiles, A, row, column, written, (Before, After), (dDt, dA, dD), (b, c, h, t, seq))
            for_slice = z % f.slices, b, slice(t, t + f.length), g
            _ = [T.copy(y, dB[(*for_slice, f.of_piece(m))]) for m, y in enumerate(db)]
            _ = [T.copy(y, dC[(*for_slice, f.of_piece(m))]) for m, y in enumerate(dc)]

    return mamba_gradients
