"""The kernels of chunk_state and chunk_scan."""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from ..arrays import accumulator
from ..attention.form import LOG2E

ROWS = 64  # of a tile of scan_pairs
MOST = 128  # accumulators that the registers of a thread hold


class SsdForm(NamedTuple):
    """What a kernel is compiled for: any batch and sequence.  length: of a chunk.  skip: whether D is read.  wide: whether
    tiles are for two warp groups of wgmma.  splits: how many blocks divide P.  blocks, stages: of scan_pairs, which has at most
    so many blocks.  pieces: heads of scan_pairs that are one head of x, each with so many of its columns."""

    length: int
    heads: int
    groups: int
    p: int
    n: int
    dtype: str
    skip: bool = False
    wide: bool = False
    splits: int = 1
    blocks: int = 0
    stages: int = 0
    pieces: int = 1

    @property
    def each(self) -> int:
        return self.heads // self.groups

    @property
    def state_block(self) -> tuple[int, int, int]:
        """Heads, rows of their states and threads of a block of state_kernel."""
        together = next(m for m in (4, 2, 1) if self.each % m == 0 and (m == 1 or self.wide and m * self.p <= 128))
        return together, together * self.p // self.splits, 256 if self.wide and together * self.p == 128 else 128

    acc = property(lambda self: accumulator(self.dtype))

    @property
    def unit(self) -> float:
        """What exponents are multiplied by before `power`."""
        return 1.0 if self.acc == "float64" else LOG2E

    def power(self, x: Any) -> Any:
        """e to the power of x / unit."""
        return T.exp(x) if self.acc == "float64" else T.exp2(x)


@T.macro
def weigh(weight, q, a, dt, at):
    """The weights of a head's steps from `at` on."""
    for s in T.Parallel(*dt.shape):
        weight[q, s] = T.exp2((a[a.shape[0] - 1] - a[at + s]) * LOG2E) * dt[s]


def state_kernel(f: SsdForm) -> Any:
    """The kernel (x, B, dt, a, states).  A block of two warp groups has two or more heads of a group, which share B; x is
    weighted in registers."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    together, rows, threads = f.state_block
    steps, shape = 128 if f.wide and f.length % 128 == 0 else 64, (batch, f.heads, chunks, f.length)

    @T.prim_func
    def chunk_state(X: T.Tensor((batch, seq, f.heads * f.p), f.dtype), B: T.Tensor((batch, seq, f.groups, f.n), f.dtype),
                    Dt: T.Tensor(shape, "float32"), A: T.Tensor(shape, "float32"),
                    States: T.Tensor((batch, chunks, f.heads * f.p, f.n), f.dtype)):
        with T.Kernel(f.heads // together * f.splits, chunks, batch, threads=threads) as (z, c, b):
            Xs, Bs = T.alloc_shared((steps, rows), f.dtype), T.alloc_shared((steps, f.n), f.dtype)
            a, dt = ([T.alloc_shared((n,), "float32") for _ in range(together)] for n in (f.length, steps))
            weight, Xw = T.alloc_shared((together, steps), "float32"), T.alloc_fragment((rows, steps), f.dtype)
            acc, h = T.alloc_fragment((rows, f.n), "float32"), z // f.splits * together
            T.clear(acc)
            for k in T.Pipelined(f.length // steps, num_stages=2):
                at = c * f.length + k * steps
                T.copy(X[b, at:at + steps, z * rows:(z + 1) * rows], Xs)
                T.copy(B[b, at:at + steps, h // f.each, :], Bs)
                _ = [T.copy(A[b, h + q, c, :], a[q]) for q in range(together)]
                _ = [T.copy(Dt[b, h + q, c, k * steps:(k + 1) * steps], dt[q]) for q in range(together)]
                _ = [weigh(weight, q, a[q], dt[q], k * steps) for q in range(together)]
                for r, s in T.Parallel(rows, steps):
                    Xw[r, s] = Xs[s, r] * weight[r // f.p if together > 1 else 0, s]
                T.gemm(Xw, Bs, acc)
            T.copy(acc, States[b, c, z * rows:(z + 1) * rows, :])

    return chunk_state


def scan_kernel(f: SsdForm) -> Any:
    """The kernel (cb, x, dt, a, C, before, D, out)."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    tile, columns = 128 if f.wide and f.length % 128 == 0 else 64, f.p // f.splits
    shape, zero = (batch, f.heads, chunks, f.length), T.cast(0, f.acc)
    d_shape = (f.heads,) if f.skip else shape

    @T.prim_func
    def chunk_scan(CB: T.Tensor((batch, chunks, f.groups, f.length, f.length), f.dtype),
                   X: T.Tensor((batch, seq, f.heads, f.p), f.dtype), Dt: T.Tensor(shape, f.acc), A: T.Tensor(shape, f.acc),
                   C: T.Tensor((batch, seq, f.groups, f.n), f.dtype),
                   Before: T.Tensor((batch, chunks, f.heads, f.p, f.n), f.dtype),
                   D: T.Tensor(d_shape, f.acc), Out: T.Tensor((batch, seq, f.heads, f.p), f.dtype)):
        with T.Kernel(f.heads * f.splits, f.length // tile, batch * chunks, threads=2 * tile) as (bx, by, bc):
            Cs, Ss = T.alloc_shared((tile, f.n), f.dtype), T.alloc_shared((columns, f.n), f.dtype)
            CBs, Xs = T.alloc_shared((tile, tile), f.dtype), T.alloc_shared((tile, columns), f.dtype)
            a_s, dt_s = T.alloc_shared((tile,), f.acc), T.alloc_shared((tile,), f.acc)
            acc, a_t = T.alloc_fragment((tile, columns), f.acc), T.alloc_fragment((tile,), f.acc)
            W, weights = T.alloc_fragment((tile, tile), f.acc), T.alloc_fragment((tile, tile), f.dtype)
            b, c, m = bc // chunks, bc % chunks, f.length // tile - 1 - by  # the longest loops first
            h, v = bx // f.splits, bx % f.splits * columns
            row = c * f.length + m * tile
            T.copy(C[b, row:row + tile, h // f.each, :], Cs)
            T.copy(Before[b, c, h, v:v + columns, :], Ss)
            T.copy(A[b, h, c, m * tile:(m + 1) * tile], a_t)
            for i in T.Parallel(tile):
                a_t[i] *= f.unit
            T.gemm(Cs, Ss, acc, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(tile, columns):
                acc[i, j] *= f.power(a_t[i])
            for k in T.Pipelined(m + 1, num_stages=2):
                at = c * f.length + k * tile
                T.copy(CB[b, c, h // f.each, m * tile:(m + 1) * tile, k * tile:(k + 1) * tile], CBs)
                T.copy(X[b, at:at + tile, h, v:v + columns], Xs)
                T.copy(A[b, h, c, k * tile:(k + 1) * tile], a_s)
                T.copy(Dt[b, h, c, k * tile:(k + 1) * tile], dt_s)
                for i, j in T.Parallel(tile, tile):
                    W[i, j] = CBs[i, j] * (f.power(a_t[i] - a_s[j] * f.unit) * dt_s[j])
                for i, j in T.Parallel(tile, tile):
                    W[i, j] = T.if_then_else(k * tile + j <= m * tile + i, W[i, j], zero)
                T.copy(W, weights)
                T.gemm(weights, Xs, acc)
            if f.skip:
                for i, j in T.Parallel(tile, columns):
                    if row + i < seq:
                        acc[i, j] += D[h] * X[b, row + i, h, v + j]
            T.copy(acc, Out[b, row:row + tile, h, v:v + columns])

    return chunk_scan


@T.macro
def produce(f, tiles, work, items, chunks):
    """Warp group 2: load the operands of all items."""
    (CB, X, Dt, A, C, Before), (Ss, a, dt, Cs, Xs, _, CBs, state, rows, squares, _), count = work, tiles, f.length // ROWS
    with T.ws(2):
        T.dec_max_nreg(24)
        for i in T.serial(items):
            item = T.get_block_binding(0) + i * f.blocks
            h, c, b = item % (f.heads // 2) * 2, item // (f.heads // 2) % chunks, item // (f.heads // 2) // chunks
            T.mbarrier_wait_parity(state[1], (i + 1) % 2)
            for q in T.unroll(2):
                T.tma_copy(Before[b, c, h + q, :, :], Ss[q, :, :], barrier=state[0])
                T.tma_copy(A[b, (h + q) // f.pieces, c, :], a[i % 2, q, :], barrier=state[0])
                T.tma_copy(Dt[b, (h + q) // f.pieces, c, :], dt[i % 2, q, :], barrier=state[0])
            T.mbarrier_arrive(state[0])
            for m in T.serial(count):
                r = i * count + m
                s, at = r % 2, c * f.length + m * ROWS
                T.mbarrier_wait_parity(rows[2 + s], (r // 2 + 1) % 2)
                T.tma_copy(C[b, at:at + ROWS, h // f.each, :], Cs[s, :, :], barrier=rows[s])
                for q in T.unroll(2):
                    T.tma_copy(X[b, at:at + ROWS, h + q, :], Xs[s, q, :, :], barrier=rows[s])
                T.mbarrier_arrive(rows[s])
                for k in T.serial(m + 1):
                    t = i * (count * (count + 1) // 2) + m * (m + 1) // 2 + k
                    g, y, x = t % f.stages, m * ROWS, k * ROWS
                    T.mbarrier_wait_parity(squares[f.stages + g], (t // f.stages + 1) % 2)
                    T.tma_copy(CB[b, c, h // f.each, y:y + ROWS, x:x + ROWS], CBs[g, :, :], barrier=squares[g])
                    T.mbarrier_arrive(squares[g])


@T.macro
def consume(f, tiles, results, items, chunks, q):
    """Warp group q: head q of each item, 64 rows of the chunk after another.  Earlier rows of x wait in Xw, scaled to the end
    of their tile: weights of pairs of tiles have no exponentials."""
    (D, Out), (Ss, a, dt, Cs, Xs, Xw, CBs, state, rows, squares, Os), count = results, tiles, f.length // ROWS
    with T.ws(q):
        T.inc_max_nreg(240)
        acc, W = T.alloc_fragment((ROWS, f.p), "float32"), T.alloc_fragment((ROWS, ROWS), f.dtype)
        row, skip, one = (T.alloc_fragment((n,), "float32") for n in (ROWS, 1, 1))
        for i in T.serial(items):
            item, u = T.get_block_binding(0) + i * f.blocks, i % 2
            h, c, b = item % (f.heads // 2) * 2 + q, item // (f.heads // 2) % chunks, item // (f.heads // 2) // chunks
            if f.skip:
                skip[0] = D[h // f.pieces]
            T.mbarrier_wait_parity(state[0], u)
            for x in T.Parallel(f.length):
                a[u, q, x] *= LOG2E
            T.sync_threads(1 + q, 128)
            for m in T.serial(count):
                r, t, at = i * count + m, i * (count * (count + 1) // 2) + m * (m + 1) // 2, m * ROWS
                s = r % 2
                T.mbarrier_wait_parity(rows[s], r // 2 % 2)
                T.wgmma_gemm(Cs[s, :, :], Ss[q, :, :], acc, transpose_B=True, clear_accum=True)
                for k in T.serial(m):
                    g, end = (t + k) % f.stages, k * ROWS + ROWS - 1
                    T.mbarrier_wait_parity(squares[g], (t + k) // f.stages % 2)
                    T.wait_wgmma(0)
                    if k > 0:
                        T.mbarrier_arrive(squares[f.stages + (t + k - 1) % f.stages])
                    one[0] = T.exp2(a[u, q, end] - T.if_then_else(k > 0, a[u, q, T.max(end - ROWS, 0)], 0.0))
                    for x, y in T.Parallel(ROWS, f.p):
                        acc[x, y] *= one[0]
                    T.wgmma_gemm(CBs[g, :, :], Xw[q, k, :, :], acc)
                g = (t + m) % f.stages
                T.mbarrier_wait_parity(squares[g], (t + m) // f.stages % 2)
                for x, y in T.Parallel(ROWS, ROWS):
                    decay = T.exp2(a[u, q, at + x] - a[u, q, at + y])
                    W[x, y] = T.if_then_else(y <= x, CBs[g, x, y] * (decay * dt[u, q, at + y]), 0.0)
                for x in T.Parallel(ROWS):
                    row[x] = T.exp2(a[u, q, at + x] - T.if_then_else(m > 0, a[u, q, T.max(at - 1, 0)], 0.0))
                T.mbarrier_arrive(squares[f.stages + g])
                T.wait_wgmma(0)
                if m > 0:
                    T.mbarrier_arrive(squares[f.stages + (t + m - 1) % f.stages])
                if m == count - 1:
                    T.mbarrier_arrive(state[1])
                for x, y in T.Parallel(ROWS, f.p):
                    acc[x, y] *= row[x]
                T.wgmma_gemm(W, Xs[s, q, :, :], acc)
                if m < count - 1:
                    for x, y in T.Parallel(ROWS, f.p):
                        Xw[q, m, x, y] = Xs[s, q, x, y] * (T.exp2(a[u, q, at + ROWS - 1] - a[u, q, at + x]) * dt[u, q, at + x])
                T.wait_wgmma(0)
                T.tma_store_wait(0)
                T.sync_threads(1 + q, 128)
                for x, y in T.Parallel(ROWS, f.p):
                    Os[q, x, y] = acc[x, y] + (skip[0] * Xs[s, q, x, y] if f.skip else 0.0)
                T.mbarrier_arrive(rows[2 + s])
                T.fence_proxy_async()
                T.sync_threads(1 + q, 128)
                T.tma_copy(Os[q, :, :], Out[b, c * f.length + at:c * f.length + at + ROWS, h, :])


def scan_pairs(f: SsdForm) -> Any:
    """The kernel (cb, x, dt, a, C, before, D, out) for wgmma: an item is a chunk of two heads of a group, which share cb and C,
    a warp group each.  A third loads.  Heads of many columns come as several, which share dt and a too."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    heads = f.heads // f.pieces
    shape = batch, heads, chunks, f.length

    @T.prim_func
    def chunk_scan_pairs(CB: T.Tensor((batch, chunks, f.groups, f.length, f.length), f.dtype),
                         X: T.Tensor((batch, seq, f.heads, f.p), f.dtype), Dt: T.Tensor(shape, "float32"),
                         A: T.Tensor(shape, "float32"), C: T.Tensor((batch, seq, f.groups, f.n), f.dtype),
                         Before: T.Tensor((batch, chunks, f.heads, f.p, f.n), f.dtype),
                         D: T.Tensor((heads,) if f.skip else shape, "float32"),
                         Out: T.Tensor((batch, seq, f.heads, f.p), f.dtype)):
        with T.Kernel(f.blocks, threads=384) as z:
            Ss, Cs = T.alloc_shared((2, f.p, f.n), f.dtype), T.alloc_shared((2, ROWS, f.n), f.dtype)
            a, dt = T.alloc_shared((2, 2, f.length), "float32"), T.alloc_shared((2, 2, f.length), "float32")
            Xs = T.alloc_shared((2, 2, ROWS, f.p), f.dtype)
            Xw = T.alloc_shared((2, max(1, f.length // ROWS - 1), ROWS, f.p), f.dtype)
            CBs = T.alloc_shared((f.stages, ROWS, ROWS), f.dtype)
            state, rows = T.alloc_barrier([128, 256]), T.alloc_barrier([128] * 2 + [256] * 2)
            tiles = Ss, a, dt, Cs, Xs, Xw, CBs, state, rows, (
                T.alloc_barrier([128] * f.stages + [256] * f.stages)), T.alloc_shared((2, ROWS, f.p), f.dtype)
            items = T.ceildiv(batch * chunks * (f.heads // 2) - z, f.blocks)
            produce(f, tiles, (CB, X, Dt, A, C, Before), items, chunks)
            consume(f, tiles, (D, Out), items, chunks, 0)
            consume(f, tiles, (D, Out), items, chunks, 1)

    return chunk_scan_pairs
