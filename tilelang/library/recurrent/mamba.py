"""`mamba2` and `retention`: state space models in chunks, with gradients.

The kernels of mamba2, forward and backward, beside chunk_scan.

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

from tilelang.errors import error

from ..arrays import accumulator, by_sequences, contiguous, empty, filled, is_numpy, padded, sum_into, type_name, zeros
from ..attention.form import LOG2E
from ..attention.inputs import check_double, check_like, fast_kernel, fitting_kernel, running_on
from ..autograd import Function, Results, Step, untraced
from ..place import Place, target_text
from .ssd import run_scan
from .ssd_kernels import SsdForm

CHUNK = 256  # steps of a chunk of forward


def mamba2(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any = None, *, initial: Any = None,
           target: Any = None) -> tuple[Any, Any]:
    """The outputs (batch, seq, heads, P), of x's type, and the last state (batch, heads, P, N), float32, of

        state_t = exp(a dt_t) state_(t-1) + dt_t x_t b_t^T,      y_t = state_t c_t + d x_t.

    x: (batch, seq, heads, P); b, c: (batch, seq, groups, N), float16 or bfloat16; heads of a group share b and c.  P and N are
    at most 256; kernels take multiples of 16, N of 64 above 64: others are copied with zeros behind.  seq is any length.  dt:
    (batch, seq, heads), float32, above 0; a: (heads,), float32, below 0; d: (heads,), float32, 0 by default.  initial: the
    state before the first step, zeros by default.  float64, for all tensors, on the CPU.

    Gradients of all tensors, of their types; the same inputs give the same bits.  Saved for them: the inputs; states of chunks
    are computed again.  Memory of backward beside the results: 4 bytes a state entry for each 64 steps, 8 bytes a step and
    head, and up to 64 bytes an entry of b.
    Kernels take any batch and length; sequences of less than 256 steps have one for each length in whole tiles of 64.
    target: as for tilelang.compile, instead of the device that x is on.

    Raises ssd-argument.

    >>> rng = np.random.default_rng(0)
    >>> x, b, c = (rng.standard_normal((1, 100, n, 64)).astype(np.float16) for n in (2, 1, 1))
    >>> y, state = mamba2(x, rng.random((1, 100, 2), np.float32), -np.ones(2, np.float32), b, c)
    >>> y.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    p, n = ((getattr(z, "shape", None) or (0,))[-1] for z in (x, b))
    more_p, more_n = -p % 16, -n % (64 if n > 64 else 16)
    if not more_p and not more_n:
        return MAMBA2(x, dt, a, b, c, d, initial, target_text(target))
    if untraced(x):
        _results(x, dt, a, b, c, d, initial, None)  # checks what the caller gave
    x, b, c = padded(x, more_p), padded(b, more_n), padded(c, more_n)
    initial = None if initial is None else padded(initial, more_n, more_p)
    y, last = MAMBA2(x, dt, a, b, c, d, initial, target_text(target))
    return y[..., :p], last[..., :p, :n]


def retention(q: Any, k: Any, v: Any, log_gamma: Any, *, scale: float | None = None, initial: Any = None,
              target: Any = None) -> tuple[Any, Any]:
    """The outputs (batch, seq, heads, dim_v), of v's type, and the last state (batch, heads, dim_v, dim_k), float32, of

        state_t = gamma state_(t-1) + v_t k_t^T,      o_t = scale state_t q_t.

    q, k: (batch, seq, heads, dim_k); v: (batch, seq, heads, dim_v), float16 or bfloat16; dimensions as P and N of mamba2, which
    computes it.  log_gamma: (heads,), float32, below 0.  scale: dim_k ** -0.5 by default, of a power of 2 without a rounding.
    float64, for all tensors, on the CPU.  The rest, and gradients, as for mamba2.

    Raises ssd-argument.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 2, 64)).astype(np.float16) for _ in range(3))
    >>> out, state = retention(q, k, v, np.log1p(-2.0 ** np.float32([-5, -6])))
    >>> out.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    steps = filled(v, tuple(v.shape[:3]), 1, type_name(log_gamma))
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    if is_numpy(q):
        scaled = scaled.astype(q.dtype)  # bfloat16 times a number is a float32
    return mamba2(v, steps, log_gamma, k, scaled, initial=initial, target=target)


def _form(x: Any, b: Any, d: Any, length: int, slices: int = 1) -> MambaForm:
    return MambaForm(x.shape[2], b.shape[2], x.shape[3], b.shape[3], length, type_name(x), slices, d is not None)


def _results(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, initial: Any, target: str | None) -> Results:
    found, kind = f"x {tuple(x.shape)}, b {tuple(b.shape)}", type_name(x)
    if x.ndim != 4 or b.ndim != 4 or x.shape[:2] != b.shape[:2] or b.shape[2] == 0 or x.shape[2] % b.shape[2]:
        raise error("ssd-argument", f"the shapes given to mamba2 do not go together: ‹{found}›",
                    expected="x (batch, seq, heads, P), b (batch, seq, groups, N), heads a multiple of groups")
    batch, seq, heads, p, n = *x.shape, b.shape[3]
    if any(not 0 < m <= 256 for m in (p, n)) or kind not in ("float16", "bfloat16", "float64"):
        raise error("ssd-argument", f"mamba2 has no kernel for {kind}, P {p} and N {n}", found=f"{kind}, P {p}, N {n}",
                    expected="float16 or bfloat16, float64 on the CPU; P and N of 1 to 256", hint="convert x, b and c")
    acc = accumulator(kind)
    given = {"dt": (dt, (batch, seq, heads), acc), "a": (a, (heads,), acc), "b": (b, tuple(b.shape), kind),
             "c": (c, tuple(b.shape), kind)}
    for name, value, shape in (("d", d, (heads,)), ("initial", initial, (batch, heads, p, n))):
        if value is not None:
            given[name] = value, shape, acc
    check_like("ssd-argument", "mamba2", x, given, ", like x", differentiable=True)
    return ((batch, seq, heads, p), kind), ((batch, heads, p, n), acc)


def _cumulate(at: Place, x: Any, dt: Any, a: Any, f: MambaForm) -> tuple[Any, Any]:
    """dt and the running sum of a dt, by chunks: (batch, heads, chunks, length)."""
    rows = x.shape[0], f.heads, -(-x.shape[1] // f.length), f.length
    by_chunks, found = empty(x, rows, f.acc), empty(x, rows, f.acc)
    fast_kernel(at, cumulate, f)(contiguous(dt), contiguous(a), by_chunks, found)
    return by_chunks, found


def _run(*args: Any) -> None:
    x, dt, a, b, c, d, initial, target, y, last = args
    before = zeros(x, tuple(last.shape), type_name(last)) if initial is None else contiguous(initial)
    if 0 in x.shape:
        last[...] = before
        return
    at, x, b, c = running_on(x, target), contiguous(x), contiguous(b), contiguous(c)
    check_double("ssd-argument", "mamba2", x, at)
    f = _form(x, b, d, min(CHUNK, -(-x.shape[1] // STEPS) * STEPS))
    dt, along = _cumulate(at, x, dt, a, f)
    batch, _, chunks, length = dt.shape
    states = empty(x, (batch, chunks, *last.shape[1:]), f.dtype)
    fast_kernel(at, walk, f, min(f.n, 64))(x, b, dt, along, before, states, last)
    cb = empty(x, (batch, chunks, f.groups, length, length), f.dtype)
    fast_kernel(at, scores, f)(c, b, cb)
    scan = SsdForm(length, f.heads, f.groups, f.p, f.n, f.dtype, d is not None)
    run_scan(at, scan, cb, x, dt, along, c, states, dt if d is None else d, y)


def _gradient_results(*args: Any) -> Results:
    def like(v: Any) -> tuple[tuple[Any, ...], str]:
        return ((0,), type_name(args[1])) if v is None else (tuple(v.shape), type_name(v))

    return tuple(map(like, args[:7]))


def _gradient(*args: Any) -> None:
    (x, dt, a, b, c, d, initial, target, dy, dlast), made = args[:10], args[10:]
    dx, ddt, da, db, dc, dd, dinitial = made
    states = x.shape[0], x.shape[2], x.shape[3], b.shape[3]
    none = zeros(x, states, type_name(dt)) if initial is None or dlast is None else None
    first, final = (none if v is None else contiguous(v) for v in (initial, dlast))
    if 0 in x.shape:
        for v in (da, db, dc, dd):
            v[...] = 0
        if initial is not None:
            dinitial[...] = final
        return
    at, x, b, c = running_on(x, target), contiguous(x), contiguous(b), contiguous(c)
    dy = zeros(x, tuple(x.shape), type_name(x)) if dy is None else contiguous(dy)
    f = _form(x, b, d, STEPS)
    f = f._replace(slices=next(s for s in (8, 4, 2, 1) if f.each % s == 0))
    sizes = [(n, m) for m in dict.fromkeys((1, max(1, f.n // 64))) for n in (STEPS, STEPS // 2, STEPS // 4)]
    forms = [f._replace(length=n, pieces=m) for n, m in sizes]
    f, kernel = fitting_kernel(at, gradients, *forms)
    dt, along = _cumulate(at, x, dt, a, f)
    batch, chunks = x.shape[0], dt.shape[2]
    before, after = (empty(x, (batch, chunks, *states[1:]), f.dtype) for _ in (0, 1))
    last, dfirst = empty(x, states, f.acc), empty(x, states, f.acc) if initial is None else dinitial
    fast_kernel(at, walks, f, min(f.n, 64))(x, b, dt, along, first, before, dy, c, final, after, dfirst, last)
    of_heads = [empty(x, (batch, chunks, f.heads), f.acc) for _ in (0, 1)]
    slices = [empty(x, (f.slices, *b.shape), f.acc) for _ in (0, 1)]
    kernel(x, contiguous(a), b, c, contiguous(a if d is None else d), dt, along, before, after, dy, dx, ddt, *of_heads, *slices)
    for out, found in zip((db, dc), slices):
        sum_into(out, found, 0)
    for out, found in zip((da, dd)[:2 if d is not None else 1], of_heads):
        sum_into(out, found, (0, 1))


_GIVEN = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? initial, str? target"
MAMBA2 = Function("mamba2", Step(_GIVEN, _results, by_sequences(_run, 2), 2),
                  Step(f"{_GIVEN}, Tensor? dy, Tensor? dlast", _gradient_results, by_sequences(_gradient, 7), 7),
                  lambda needs, given, made: given, tuple(range(7)), visible=2)


# ---- kernels ----------------------------------------------------------------------------------------------------------

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

    acc = property(lambda self: accumulator(self.dtype))

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
    rows, tiles = (batch, seq, f.groups, f.n), f.length // STEPS

    @T.prim_func
    def mamba_scores(C: T.Tensor(rows, f.dtype), B: T.Tensor(rows, f.dtype),
                       CB: T.Tensor((batch, chunks, f.groups, f.length, f.length), f.dtype)):
        with T.Kernel(tiles * tiles * batch * chunks * f.groups, threads=128) as block:  # along z a grid has 65535
            j, i, z = block % tiles, block // tiles % tiles, block // (tiles * tiles)
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
