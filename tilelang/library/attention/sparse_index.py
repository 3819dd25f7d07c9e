"""`index_scores` and `topk_indices`: which keys a query of sparse attention attends to (DeepSeek's lightning indexer).

index_scores multiplies tiles of keys by the heads of a few queries, which stay in shared memory: keys are the rows of the
accumulator, so the sum over heads stays within four threads.

topk_indices finds the k-th largest value of a row by its bits, as numbers of the same order: three histograms of 11, 11 and 10
bits, each of the values that agree with the bits found so far. Values above it are taken, and of those equal to it the first,
each at the place that a running count gives it. So the result has one order, whatever the order in which threads run.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import tilelang.language as T
from tilelang.errors import error

from ..arrays import contiguous, empty, type_name
from .inputs import check_like, fast_kernel, running_on

_TYPES = "float8_e4m3fn", "float16", "bfloat16"
BINS = 2048


def index_scores(q: Any, k: Any, weights: Any, q_scale: Any = None, k_scale: Any = None, ends: Any = None, *,
                 target: Any = None) -> Any:
    """k_scale[j] * sum over heads h of weights[i, h] * q_scale[i, h] * relu(q[i, h] . k[j]): (queries, keys), float32.

    q: (queries, heads, dim); k: (keys, dim): both float8_e4m3fn, float16 or bfloat16; dim a multiple of 32 up to 256, heads a
    power of two up to 128. weights, q_scale: (queries, heads), float32; k_scale: (keys,), float32; scales are positive, None
    is 1. ends: (queries,) int32: scores of keys from ends[i] on are -inf, and most of them take no time; None: all keys.
    Raises attention-argument, attention-shape, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k = (rng.standard_normal(shape).astype(np.float16) for shape in ((5, 64, 128), (100, 128)))
    >>> index_scores(q, k, np.ones((5, 64), np.float32), ends=np.arange(96, 101, dtype=np.int32)).shape
    (5, 100)
    """
    if (q.ndim, k.ndim) != (3, 2) or q.shape[2] != k.shape[1] or (type_name(q), type_name(k)) not in [(t, t) for t in _TYPES]:
        found = f"q {type_name(q)} {tuple(q.shape)}, k {type_name(k)} {tuple(k.shape)}"
        raise error("attention-argument", f"index_scores: {found}", found=found,
                    expected=f"q (queries, heads, dim) and k (keys, dim), both {', '.join(_TYPES[:2])} or {_TYPES[2]}")
    (queries, heads, dim), keys = (int(n) for n in q.shape), int(k.shape[0])
    if dim % 32 or not 0 < dim <= 256 or heads not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise error("attention-shape", f"index_scores has no kernel for {heads} heads of {dim}",
                    found=f"{heads} heads of {dim}", expected="a multiple of 32 up to 256, a power of two up to 128 heads",
                    hint="pad with zeros")
    ends, k_scale = (y if y is not None else _filled(q, (n,), value, kind) for y, n, value, kind in (
        (ends, queries, keys, "int32"), (k_scale, keys, 1, "float32")))
    check_like("attention-shape", "index_scores", q, {
        "k": (k, (keys, dim), type_name(q)), "weights": (weights, (queries, heads), "float32"),
        "q_scale": (weights if q_scale is None else q_scale, (queries, heads), "float32"),
        "k_scale": (k_scale, (keys,), "float32"), "ends": (ends, (queries,), "int32")}, hint="convert the arguments")
    out = empty(q, (queries, keys), "float32")
    if queries and keys:
        at = running_on(q, target)
        kernel = fast_kernel(at, index_kernel, heads, dim, type_name(q), at.target.has_wgmma)
        weights = weights if q_scale is None else weights * q_scale
        kernel(*map(contiguous, (q.reshape(queries * heads, dim), k, weights.reshape(queries * heads), k_scale, ends)), out)
    return out


def topk_indices(scores: Any, k: int, ends: Any = None, *, target: Any = None) -> Any:
    """The indices of the k largest of the first ends[i] scores of each row, rising: (rows, k) int32; -1 behind the last one.

    scores: (rows, n) float32; a NaN counts as larger than all numbers by its sign. Of equal scores the first are taken. ends:
    (rows,) int32; None: n. Results are the same bits for the same inputs. A block reads each row four times.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> topk_indices(np.array([[3, 1, 2, 3], [0, 5, 6, 7]], np.float32), 2, np.array([4, 1], np.int32)).tolist()
    [[0, 3], [0, -1]]
    """
    if scores.ndim != 2 or type_name(scores) != "float32":
        found = f"{type_name(scores)} {tuple(scores.shape)}"
        raise error("attention-argument", f"topk_indices: scores are {found}", expected="float32 (rows, n)", found=found)
    if k < 1:
        raise error("attention-option", f"topk_indices of {k} elements", expected="a positive number", found=str(k),
                    hint="k is a number of Python")
    rows, n = (int(x) for x in scores.shape)
    ends = _filled(scores, (rows,), n, "int32") if ends is None else ends
    check_like("attention-shape", "topk_indices", scores, {"ends": (ends, (rows,), "int32")}, hint="convert the arguments")
    if not n:
        return _filled(scores, (rows, k), -1, "int32")
    out = empty(scores, (rows, k), "int32")
    if rows:
        at = running_on(scores, target)
        kernel = at.kernel(topk_kernel, k, at.target.is_gpu)
        kernel(contiguous(scores), contiguous(ends), out)
    return out


def _filled(like: Any, shape: tuple[int, ...], value: int, kind: str) -> Any:
    out = empty(like, shape, kind)
    out[...] = value
    return out


def index_kernel(heads: int, dim: int, dtype: str, wide: bool, stages: int = 3, tile: int = 128) -> Any:
    """The kernel (Q, K, W, Unit, Ends, Out). W: weights with the scales of the queries. wide: tiles for wgmma."""
    per, tile, threads = max(1, 128 // heads), tile if wide else 64, 256 if wide else 128
    columns = per * heads
    queries, keys = T.dynamic("queries, keys")

    def furthest(Ends: Any, first: Any) -> Any:
        return reduce(T.max, (Ends[T.min(first + i, queries - 1)] for i in range(per)))

    @T.prim_func
    def index_scores(Q: T.Tensor((queries * heads, dim), dtype), K: T.Tensor((keys, dim), dtype),
                     W: T.Tensor((queries * heads,), "float32"), Unit: T.Tensor((keys,), "float32"),
                     Ends: T.Tensor((queries,), "int32"), Out: T.Tensor((queries, keys), "float32")):
        with T.Kernel(T.ceildiv(queries, per), threads=threads) as b:
            Qs, Ks = T.alloc_shared((columns, dim), dtype), T.alloc_shared((tile, dim), dtype)
            S, weight = T.alloc_fragment((tile, columns), "float32"), T.alloc_fragment((columns,), "float32")
            total, unit = T.alloc_fragment((tile, per), "float32"), T.alloc_fragment((tile,), "float32")
            T.copy(Q[b * columns:(b + 1) * columns, :], Qs)
            T.copy(W[b * columns:(b + 1) * columns], weight)
            used = T.ceildiv(T.max(T.min(furthest(Ends, b * per), keys), 0), tile)
            for t in T.Pipelined(used, num_stages=stages):
                T.copy(K[t * tile:(t + 1) * tile, :], Ks)
                T.copy(Unit[t * tile:(t + 1) * tile], unit)
                T.gemm(Ks, Qs, S, transpose_B=True, clear_accum=True)
                for j, n in T.Parallel(tile, columns):
                    S[j, n] = T.max(S[j, n], 0.0) * weight[n]
                T.reduce_sum(T.reshape(S, (tile, per, heads)), total, dim=2)
                for i, j in T.Parallel(per, tile):
                    if T.And(t * tile + j < keys, b * per + i < queries):
                        shown = t * tile + j < Ends[b * per + i]
                        Out[b * per + i, t * tile + j] = T.if_then_else(shown, total[j, i] * unit[j], -T.infinity("float32"))
            for t in T.serial(used, T.ceildiv(keys, tile)):
                for i, j in T.Parallel(per, tile):
                    if T.And(t * tile + j < keys, b * per + i < queries):
                        Out[b * per + i, t * tile + j] = -T.infinity("float32")

    return index_scores


def _ordered(x: Any) -> Any:
    """The bits of a float32 as a number of the same order; the two zeros are one number."""
    bits = T.if_then_else(x == 0.0, T.uint32(0), T.reinterpret(x, "uint32"))
    return T.if_then_else(bits >> T.uint32(31) == 0, bits | T.uint32(1 << 31), ~bits)


@T.macro
def _refine(X, r, end, work, found, shift, bits, tile):
    """(the value of rank `want` with `bits` more bits, its rank among the values that agree with them).

    found: (its higher bits, its rank among the values that have them)."""
    (hist, last, digit), (least, want) = work, found
    T.clear(hist)
    for c in T.serial(T.ceildiv(end, tile)):
        for j in T.Parallel(tile):
            if c * tile + j < end:
                key = _ordered(X[r, c * tile + j])
                if shift + bits == 32:
                    T.atomic_add(hist[T.cast(key >> T.uint32(shift), "int32")], 1)
                else:
                    if key >> T.uint32(shift + bits) == least >> T.uint32(shift + bits):
                        T.atomic_add(hist[T.cast(key >> T.uint32(shift) & T.uint32(2**bits - 1), "int32")], 1)
    T.cumsum(hist, reverse=True)
    for b in T.Parallel(BINS):
        last[b] = T.if_then_else(hist[b] >= want, b, 0)
    T.reduce_max(last, digit, dim=0)
    above = T.if_then_else(digit[0] < BINS - 1, hist[T.min(digit[0] + 1, BINS - 1)], 0)
    return least | T.cast(digit[0], "uint32") << T.uint32(shift), want - above


def topk_kernel(k: int, wide: bool, tile: int = 4096, threads: int = 1024) -> Any:
    """The kernel (X, Ends, Out). wide: blocks of 1024 threads."""
    tile, threads = (tile, threads) if wide else (256, 32)
    rows, n = T.dynamic("rows, n")

    @T.prim_func
    def topk_indices(X: T.Tensor((rows, n), "float32"), Ends: T.Tensor((rows,), "int32"), Out: T.Tensor((rows, k), "int32")):
        with T.Kernel(rows, threads=threads) as r:
            hist, flags = T.alloc_shared((BINS,), "int32"), T.alloc_shared((tile,), "int32")
            work = hist, T.alloc_fragment((BINS,), "int32"), T.alloc_fragment((1,), "int32")
            least, want = T.alloc_var("uint32", init=0), T.alloc_var("int32")
            above, ties = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)  # before this tile
            end = T.max(T.min(Ends[r], n), 0)
            some = T.min(end, k)
            want = some
            least, want = _refine(X, r, end, work, (least, want), 21, 11, tile)
            least, want = _refine(X, r, end, work, (least, want), 10, 11, tile)
            least, want = _refine(X, r, end, work, (least, want), 0, 10, tile)
            for c in T.serial(T.ceildiv(end, tile)):
                for j in T.Parallel(tile):  # values above and ties, counted in one number
                    key = _ordered(X[r, T.min(c * tile + j, n - 1)])
                    taken = T.if_then_else(key > least, 1, T.if_then_else(key == least, 65536, 0))
                    flags[j] = T.if_then_else(c * tile + j < end, taken, 0)
                T.cumsum(flags)
                for j in T.Parallel(tile):
                    before = T.if_then_else(j > 0, flags[T.max(j, 1) - 1], 0)
                    mine, level = flags[j] - before, ties + (before >> 16)
                    if T.Or(mine == 1, T.And(mine == 65536, level < want)):
                        Out[r, above + before % 65536 + T.min(level, want)] = c * tile + j
                above = above + flags[tile - 1] % 65536
                ties = ties + (flags[tile - 1] >> 16)
            for i in T.Parallel(k):
                if i >= some:
                    Out[r, i] = -1

    return topk_indices
