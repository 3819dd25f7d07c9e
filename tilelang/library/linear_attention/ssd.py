"""`chunk_state` and `chunk_scan`: the two kernels of a state space model in chunks (Mamba-2) that take nearly all of its time.

With a the running sum of A dt within a chunk, x of P channels, and B, C of N state entries, for each head:
    states = sum over s of exp(a_last - a_s) dt_s x_s B_s^T                                            (P, N) for each chunk
    out_t  = exp(a_t) C_t before^T + sum over s <= t of (C_t . B_s) exp(a_t - a_s) dt_s x_s + D x_t
`before` is the state before the chunk.  Both need a <= 0 that falls, as A < 0 and dt > 0 make it: no exponential exceeds 1.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.errors import error, register

from ..arrays import contiguous, empty, is_numpy, type_name
from ..attention.form import LOG2E
from ..attention.inputs import check_like, fitting_kernel, running_on

MOST = 128 * 256  # elements of a state that the registers of a block of 128 threads hold

register("ssd-argument", ValueError, "tensors of a state space model that do not go together",
         "see the shapes in the docstring of the function", expected="tensors of the shapes and types that the function names")


def chunk_state(x: Any, b: Any, dt: Any, da_cumsum: Any, *, target: Any = None) -> Any:
    """What each chunk adds to the state: (batch, chunks, heads, P, N), of x's type.

    x: (batch, seq, heads, P); b: (batch, seq, groups, N), float16 or bfloat16; heads of a group share b.
    dt, da_cumsum: (batch, heads, chunks, length), float32.  The length of a chunk is a multiple of 64, P and N of 16, at most
    256.

    Raises ssd-argument, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> x, b = (rng.standard_normal((1, 128, n, 64)).astype(np.float16) for n in (2, 1))
    >>> dt = rng.random((1, 2, 2, 64), np.float32)
    >>> chunk_state(x, b, dt, -np.cumsum(dt, -1)).shape
    (1, 2, 2, 64, 64)
    """
    sizes = _check("chunk_state", x, b, dt, {"da_cumsum": (da_cumsum, tuple(dt.shape), "float32")})
    batch, chunks, _, heads, _, p, n = sizes
    out = empty(x, (batch, chunks, heads, p, n), type_name(x))
    flat = contiguous(x).reshape(batch, x.shape[1], heads * p)
    _run(state_kernel, x, sizes, target, flat, b, dt, da_cumsum, out.reshape(batch, chunks, heads * p, n))
    return out


def chunk_scan(cb: Any, x: Any, dt: Any, da_cumsum: Any, c: Any, before: Any, d: Any = None, *, target: Any = None) -> Any:
    """The output (batch, seq, heads, P) of each chunk, of x's type.

    cb: (batch, chunks, groups, length, length), c b^T of each chunk, of which entries [t, s] with s <= t are used; x: (batch,
    seq, heads, P); c: (batch, seq, groups, N); before: the states before the chunks, (batch, chunks, heads, P, N): all float16
    or bfloat16.  dt, da_cumsum: (batch, heads, chunks, length), float32.  d: (heads,), float32, or None for 0.  Sizes as for
    chunk_state.

    Raises ssd-argument, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> x, c = (rng.standard_normal((1, 128, n, 64)).astype(np.float16) for n in (2, 1))
    >>> cb, before = np.zeros((1, 2, 1, 64, 64), np.float16), np.zeros((1, 2, 2, 64, 64), np.float16)
    >>> chunk_scan(cb, x, np.ones((1, 2, 2, 64), np.float32), np.zeros((1, 2, 2, 64), np.float32), c, before).shape
    (1, 128, 2, 64)
    """
    kind = type_name(x)
    batch, chunks, length, heads, groups, p, n = _sizes("chunk_scan", x, c, dt)
    others = {"cb": (cb, (batch, chunks, groups, length, length), kind), "da_cumsum": (da_cumsum, tuple(dt.shape), "float32"),
              "before": (before, (batch, chunks, heads, p, n), kind)}
    if d is not None:
        others["d"] = d, (heads,), "float32"
    sizes = _check("chunk_scan", x, c, dt, others)
    out = empty(x, (batch, chunks * length, heads, p), kind)
    _run(scan_kernel, x, (*sizes, d is not None), target, cb, x, dt, da_cumsum, c, before, dt if d is None else d, out)
    return out


def _sizes(name: str, x: Any, b: Any, dt: Any) -> tuple[int, ...]:
    """(batch, chunks, length, heads, groups, P, N).  Raises ssd-argument."""
    found = f"x {tuple(x.shape)}, b or c {tuple(b.shape)}, dt {tuple(dt.shape)}"
    if (x.ndim, b.ndim, dt.ndim) != (4, 4, 4) or x.shape[:2] != b.shape[:2] or dt.shape[:2] != x.shape[::2] or \
            dt.shape[2] * dt.shape[3] != x.shape[1] or b.shape[2] == 0 or x.shape[2] % b.shape[2]:
        raise error("ssd-argument", f"the shapes given to {name} do not go together: {found}", found=found,
                    expected="x (batch, seq, heads, P), b or c (batch, seq, groups, N), dt (batch, heads, chunks, length)",
                    hint="pad the sequence to whole chunks")
    p, n, length = x.shape[3], b.shape[3], dt.shape[3]
    if length % 64 or any(m % 16 or not 0 < m <= 256 for m in (p, n)):
        raise error("ssd-argument", f"{name} has no kernel for chunks of {length}, P {p} and N {n}",
                    expected="chunks of a multiple of 64, P and N multiples of 16 up to 256",
                    found=f"chunks of {length}, P {p}, N {n}", hint="pad with zeros")
    return x.shape[0], dt.shape[2], length, x.shape[2], b.shape[2], p, n


def _check(name: str, x: Any, b: Any, dt: Any, others: dict[str, tuple[Any, tuple[int, ...], str]]) -> tuple[int, ...]:
    """The sizes.  others: name -> (tensor, its shape, its type).  Raises ssd-argument, attention-gradient."""
    sizes, kind = _sizes(name, x, b, dt), type_name(x)
    if kind not in ("float16", "bfloat16"):
        raise error("ssd-argument", f"x is {kind}", expected="float16 or bfloat16", found=kind)
    given = {"b or c": (b, tuple(b.shape), kind), "dt": (dt, tuple(dt.shape), "float32"), **others}
    check_like("ssd-argument", name, x, given, ", like x")
    return sizes


def _run(make: Any, x: Any, sizes: tuple[Any, ...], target: Any, *arrays: Any) -> None:
    if arrays[-1].size if is_numpy(x) else arrays[-1].numel():
        at = running_on(x, target)
        p, n = sizes[5:7]
        splits = [s for s in (1, 2, 4) if p % (16 * s) == 0 and (make is not state_kernel or p * n <= s * MOST)] or [1]
        _, kernel = fitting_kernel(at, make, *((sizes, type_name(x), at.target.has_wgmma, s) for s in splits))
        kernel(*map(contiguous, arrays[:-1]), arrays[-1])


def state_kernel(form: tuple[tuple[int, ...], str, bool, int]) -> Any:
    """The kernel (x, B, dt, a, states).  form: sizes; type; whether tiles are for two warp groups of wgmma, which share B among
    heads of a group; how many blocks divide P."""
    (batch, chunks, length, heads, groups, p, n), dtype, wide, splits = form
    each = heads // groups
    together = next(m for m in (4, 2, 1) if each % m == 0 and (m == 1 or wide and m * p <= 128))
    rows, threads = together * p // splits, 256 if wide and together * p == 128 else 128
    steps, steps_shape = 128 if wide and length % 128 == 0 else 64, (batch, heads, chunks, length)

    @T.prim_func
    def chunk_state(X: T.Tensor((batch, chunks * length, heads * p), dtype),
                    B: T.Tensor((batch, chunks * length, groups, n), dtype),
                    Dt: T.Tensor(steps_shape, "float32"), A: T.Tensor(steps_shape, "float32"),
                    States: T.Tensor((batch, chunks, heads * p, n), dtype)):
        with T.Kernel(heads // together * splits, chunks, batch, threads=threads) as (h, c, b):
            Xs, Xw = T.alloc_shared((steps, rows), dtype), T.alloc_shared((steps, rows), dtype)
            Bs, weight = T.alloc_shared((steps, n), dtype), T.alloc_shared((together, length), "float32")
            acc = T.alloc_fragment((rows, n), "float32")
            for q, s in T.Parallel(together, length):
                head = h // splits * together + q
                weight[q, s] = T.exp2((A[b, head, c, length - 1] - A[b, head, c, s]) * LOG2E) * Dt[b, head, c, s]
            T.clear(acc)
            for k in T.Pipelined(length // steps, num_stages=2):
                at = c * length + k * steps
                T.copy(X[b, at:at + steps, h * rows:(h + 1) * rows], Xs)
                T.copy(B[b, at:at + steps, h // splits * together // each, :], Bs)
                for s, r in T.Parallel(steps, rows):
                    Xw[s, r] = Xs[s, r] * weight[(h % splits * rows + r) // p, k * steps + s]
                T.gemm(Xw, Bs, acc, transpose_A=True)
            T.copy(acc, States[b, c, h * rows:(h + 1) * rows, :])

    return chunk_state


def scan_kernel(form: tuple[tuple[int, ...], str, bool, int]) -> Any:
    """The kernel (cb, x, dt, a, C, before, D, out).  form: as of state_kernel, sizes with whether D is read."""
    (batch, chunks, length, heads, groups, p, n, skip), dtype, wide, splits = form
    each, tile, columns = heads // groups, 128 if wide and length % 128 == 0 else 64, p // splits
    steps_shape = batch, heads, chunks, length
    d_shape = (heads,) if skip else steps_shape

    @T.prim_func
    def chunk_scan(CB: T.Tensor((batch, chunks, groups, length, length), dtype),
                   X: T.Tensor((batch, chunks * length, heads, p), dtype),
                   Dt: T.Tensor(steps_shape, "float32"), A: T.Tensor(steps_shape, "float32"),
                   C: T.Tensor((batch, chunks * length, groups, n), dtype),
                   Before: T.Tensor((batch, chunks, heads, p, n), dtype),
                   D: T.Tensor(d_shape, "float32"), Out: T.Tensor((batch, chunks * length, heads, p), dtype)):
        with T.Kernel(heads * splits, length // tile, batch * chunks, threads=2 * tile) as (bx, by, bc):
            Cs, Ss = T.alloc_shared((tile, n), dtype), T.alloc_shared((columns, n), dtype)
            CBs, Xs = T.alloc_shared((tile, tile), dtype), T.alloc_shared((tile, columns), dtype)
            a_s, dt_s = T.alloc_shared((tile,), "float32"), T.alloc_shared((tile,), "float32")
            acc, a_t = T.alloc_fragment((tile, columns), "float32"), T.alloc_fragment((tile,), "float32")
            W, weights = T.alloc_fragment((tile, tile), "float32"), T.alloc_fragment((tile, tile), dtype)
            b, c, m = bc // chunks, bc % chunks, length // tile - 1 - by  # the longest loops first
            h, v = bx // splits, bx % splits * columns
            row = c * length + m * tile
            T.copy(C[b, row:row + tile, h // each, :], Cs)
            T.copy(Before[b, c, h, v:v + columns, :], Ss)
            T.copy(A[b, h, c, m * tile:(m + 1) * tile], a_t)
            for i in T.Parallel(tile):
                a_t[i] *= LOG2E
            T.gemm(Cs, Ss, acc, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(tile, columns):
                acc[i, j] *= T.exp2(a_t[i])
            for k in T.Pipelined(m + 1, num_stages=2):
                at = c * length + k * tile
                T.copy(CB[b, c, h // each, m * tile:(m + 1) * tile, k * tile:(k + 1) * tile], CBs)
                T.copy(X[b, at:at + tile, h, v:v + columns], Xs)
                T.copy(A[b, h, c, k * tile:(k + 1) * tile], a_s)
                T.copy(Dt[b, h, c, k * tile:(k + 1) * tile], dt_s)
                for i, j in T.Parallel(tile, tile):
                    W[i, j] = CBs[i, j] * (T.exp2(a_t[i] - a_s[j] * LOG2E) * dt_s[j])
                for i, j in T.Parallel(tile, tile):
                    W[i, j] = T.if_then_else(k * tile + j <= m * tile + i, W[i, j], 0.0)
                T.copy(W, weights)
                T.gemm(weights, Xs, acc)
            if skip:
                for i, j in T.Parallel(tile, columns):
                    acc[i, j] += D[h] * X[b, row + i, h, v + j]
            T.copy(acc, Out[b, row:row + tile, h, v:v + columns])

    return chunk_scan
