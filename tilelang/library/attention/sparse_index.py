"""`index_scores`: how much a query of sparse attention asks for a key (DeepSeek's lightning indexer).

Tiles of keys are multiplied by the heads of a few queries, which stay in shared memory: keys are the rows of the accumulator.
A thread holds two of each eight columns. Queries alternate in these eight, so that one thread, or two or four, hold the heads
of a query: sums need few exchanges, and no thread stores what another one does.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import tilelang.language as T
from tilelang.errors import error

from ..arrays import contiguous, empty, filled, type_name
from .inputs import check_like, fast_kernel, running_on

COLUMNS, TILE = 128, 192  # heads of all queries of a block, and keys of a tile of three warp groups
MOST = 16  # queries of a block
STAGES, ROOM = 4, 226 * 1024  # of loads at most; bytes of shared memory for queries and keys
_TYPES = "float8_e4m3fn", "float16", "bfloat16"


def index_scores(q: Any, k: Any, weights: Any, q_scale: Any = None, k_scale: Any = None, ends: Any = None, *,
                 target: Any = None) -> Any:
    """k_scale[j] * sum over heads h of weights[i, h] * q_scale[i, h] * relu(q[i, h] . k[j]): (queries, keys), float32.

    q: (queries, heads, dim); k: (keys, dim): both float8_e4m3fn, float16 or bfloat16; dim a multiple of 32 up to 256, up to 128
    heads. weights, q_scale: (queries, heads), float32; k_scale: (keys,), float32; scales are positive, None is 1. ends:
    (queries,) int32: scores of keys from ends[i] on are -inf, and most of them take no time; None: all keys.
    Sums are float32; the MMAs of sm_90 accumulate float8 values with about 13 bits.
    Raises attention-argument, attention-shape, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k = (rng.standard_normal(shape).astype(np.float16) for shape in ((5, 64, 128), (100, 128)))
    >>> index_scores(q, k, np.ones((5, 64), np.float32), ends=np.arange(96, 101, dtype=np.int32)).shape
    (5, 100)
    """
    if (q.ndim, k.ndim) != (3, 2) or q.shape[2] != k.shape[1] or (type_name(q), type_name(k)) not in [(t, t) for t in _TYPES]:
        found = f"q {type_name(q)} {tuple(q.shape)}, k {type_name(k)} {tuple(k.shape)}"
        raise error("attention-argument", f"index_scores: ‹{found}›",
                    expected=f"q (queries, heads, dim) and k (keys, dim), both {', '.join(_TYPES[:2])} or {_TYPES[2]}")
    (queries, heads, dim), keys = (int(n) for n in q.shape), int(k.shape[0])
    if dim % 32 or not 0 < dim <= 256 or not 0 < heads <= 128:
        raise error("attention-shape", f"index_scores has no kernel for ‹{heads} heads of {dim}›",
                    expected="a multiple of 32 up to 256, 1 to 128 heads", hint="pad with zeros")
    ends, k_scale = (y if y is not None else filled(q, (n,), value, kind) for y, n, value, kind in (
        (ends, queries, keys, "int32"), (k_scale, keys, 1, "float32")))
    check_like("attention-shape", "index_scores", q, {
        "k": (k, (keys, dim), type_name(q)), "weights": (weights, (queries, heads), "float32"),
        "q_scale": (weights if q_scale is None else q_scale, (queries, heads), "float32"),
        "k_scale": (k_scale, (keys,), "float32"), "ends": (ends, (queries,), "int32")}, hint="convert the arguments")
    out = empty(q, (queries, keys), "float32")
    if queries and keys:
        at = running_on(q, target)
        weights = weights if q_scale is None else weights * q_scale
        wide, sms = at.target.has_wgmma, max(1, at.sms or at.target.limits.sm_count)
        columns, tile, _ = tile_of(heads, wide, dim * int(q.itemsize))
        pieces = _pieces(-(-queries // arrangement(heads, columns)[0]), -(-keys // tile), sms)
        tensors = map(contiguous, (q.reshape(queries * heads, dim), k, weights.reshape(queries * heads), k_scale, ends))
        kernel = fast_kernel(at, index_kernel, heads, dim, type_name(q), wide, pieces > 1)
        kernel(*tensors, *[pieces] * (pieces > 1), out)
    return out


def _pieces(blocks: int, tiles: int, sms: int) -> int:
    """How many blocks divide the tiles of keys of the same queries. A block takes the time of two tiles to start and end."""
    return min(range(1, max(2, min(sms, tiles + 1))), key=lambda n: -(-blocks * n // sms) * (-(-tiles // n) + 2))


def arrangement(heads: int, columns: int = COLUMNS) -> tuple[int, int, int]:
    """(queries of a block, those that alternate in eight columns, heads of a query with padding): as many as fit, up to MOST:
    each has a sum and a store in every thread that holds it."""
    held = {n: -(-heads * n // 8) * 8 // n for n in (1, 2, 4, 8)}
    beside = max((n for n in held if n * held[n] <= columns), default=1)
    return min(max(1, columns // (beside * held[beside])) * beside, MOST), beside, held[beside]


def tile_of(heads: int, wide: bool, row: int) -> tuple[int, int, int]:
    """(columns, keys) of a tile at most, and stages. row: bytes of a key. Two groups have twice the columns of three, where a
    quarter of those would be empty and several threads would share a query. Two stages of wide keys fit with smaller tiles."""
    if not wide:
        return COLUMNS, 64, STAGES
    per, beside, held = arrangement(heads)
    few = per * held <= COLUMNS * 3 // 4 and beside < 4
    tiles = [(2 * COLUMNS, 2 * TILE // 3)] * few + [(COLUMNS, TILE), (COLUMNS, 2 * TILE // 3)]
    fitting = [(*x, min(STAGES, (ROOM // row - x[0]) // x[1])) for x in tiles]
    return next((x for x in fitting if x[2] > 1), fitting[-1])


def place_of(n: Any, beside: int, held: int) -> tuple[Any, Any]:
    """The query and the head of a column."""
    share, group, at = 8 // beside, n // 8, n % 8
    return group // (held // share) * beside + at // share, group % (held // share) * share + at % share


@T.macro
def load_columns(Q, W, Qs, weight, first, queries, heads, arranged):
    """Load the queries of a block, from `first` on, as columns, and their weights. arranged: as place_of takes it."""
    beside, held = arranged
    if beside == 1 and held == heads:  # rows in order: by TMA, under the tiles before
        T.copy(Q[first * heads:first * heads + Qs.shape[0], :], Qs)
    else:
        for n, d in T.Parallel(*Qs.shape):
            i, h = place_of(n, *arranged)
            row = T.min(first + i, queries - 1) * heads + T.min(h, heads - 1)
            Qs[n, d] = T.if_then_else(h < heads, Q[row, d], 0)
    for n in T.Parallel(Qs.shape[0]):
        i, h = place_of(n, *arranged)
        row = T.min(first + i, queries - 1) * heads + T.min(h, heads - 1)
        weight[n] = T.if_then_else(h < heads, W[row], 0.0)


def index_kernel(heads: int, dim: int, dtype: str, wide: bool, divided: bool = False) -> Any:
    """The kernel (Q, K, W, Unit, Ends, Out), or where `divided` (Q, K, W, Unit, Ends, pieces, Out). W: weights with the scales
    of the queries. pieces: blocks that divide the keys of the same queries. wide: tiles for wgmma, of two or three groups.

    Weighted scores have a fragment of their own: in registers of the GEMM they would be no multiply-adds of the sums.
    Scales of keys are loaded into registers one tile ahead.
    """
    most, tile, stages = tile_of(heads, wide, dim * (1 if dtype == _TYPES[0] else 2))
    per, beside, held = arrangement(heads, most)
    columns, share, threads = per * held, 8 // beside, 2 * tile
    queries, keys = T.dynamic("queries, keys")

    def furthest(Ends: Any, first: Any) -> Any:
        return reduce(T.max, (Ends[T.min(first + i, queries - 1)] for i in range(per)))

    q, k, out = T.Tensor((queries * heads, dim), dtype), T.Tensor((keys, dim), dtype), T.Tensor((queries, keys), "float32")
    w, units, limits = T.Tensor((queries * heads,), "float32"), T.Tensor((keys,), "float32"), T.Tensor((queries,), "int32")

    @T.macro
    def block(Q, K, W, Unit, Ends, Out, b, piece):
        Qs, Ks = T.alloc_shared((columns, dim), dtype), T.alloc_shared((tile, dim), dtype)
        S, weighted = T.alloc_fragment((tile, columns), "float32"), T.alloc_fragment((tile, columns), "float32")
        weight = T.alloc_fragment((columns,), "float32")
        some = T.alloc_fragment((tile, per // beside, beside, share), "float32")
        total = T.alloc_fragment((tile, per // beside, beside), "float32")
        unit, ahead = T.alloc_fragment((tile,), "float32"), T.alloc_fragment((tile,), "float32")
        end = T.alloc_fragment((per // beside, beside), "int32")
        load_columns(Q, W, Qs, weight, b * per, queries, heads, (beside, held))
        for m, i in T.Parallel(per // beside, beside):
            end[m, i] = Ends[T.min(b * per + m * beside + i, queries - 1)]
        used = T.ceildiv(T.max(T.min(furthest(Ends, b * per), keys), 0), tile)
        first, last = piece(0, used)
        for j in T.Parallel(tile):
            ahead[j] = Unit[T.min(first * tile + j, keys - 1)]
        for t in T.Pipelined(first, last, num_stages=stages):
            T.copy(K[t * tile:(t + 1) * tile, :], Ks)
            T.copy(ahead, unit)
            for j in T.Parallel(tile):
                ahead[j] = Unit[T.min((t + 1) * tile + j, keys - 1)]
            T.gemm(Ks, Qs, S, transpose_B=True, clear_accum=True)
            for j, n in T.Parallel(tile, columns):
                weighted[j, n] = T.max(S[j, n], 0.0) * weight[n]
            if share == 1:
                T.reduce_sum(T.reshape(weighted, (tile, per // beside, held, beside)), total, dim=2)
            else:
                T.reduce_sum(T.reshape(weighted, (tile, per // beside, held // share, beside, share)), some, dim=2)
                T.reduce_sum(some, total, dim=3)
            for m, i, j in T.Parallel(per // beside, beside, tile):
                n = b * per + m * beside + i
                if T.And(t * tile + j < keys, n < queries):
                    shown = t * tile + j < end[m, i]
                    Out[n, t * tile + j] = T.if_then_else(shown, total[j, m, i] * unit[j], -T.infinity("float32"))
        first_hidden, last_hidden = piece(used, T.ceildiv(keys, tile))
        for t in T.serial(first_hidden, last_hidden):
            for i, j in T.Parallel(per, tile):
                if T.And(t * tile + j < keys, b * per + i < queries):
                    Out[b * per + i, t * tile + j] = -T.infinity("float32")

    if divided:
        @T.prim_func
        def index_scores(Q: q, K: k, W: w, Unit: units, Ends: limits, pieces: T.int32, Out: out):
            with T.Kernel(T.ceildiv(queries, per), pieces, threads=threads) as (b, p):
                block(Q, K, W, Unit, Ends, Out, b, lambda begin, end: tuple(
                    begin + (end - begin) * n // pieces for n in (p, p + 1)))
    else:
        @T.prim_func
        def index_scores(Q: q, K: k, W: w, Unit: units, Ends: limits, Out: out):
            with T.Kernel(T.ceildiv(queries, per), threads=threads) as b:
                block(Q, K, W, Unit, Ends, Out, b, lambda begin, end: (begin, end))

    return index_scores
