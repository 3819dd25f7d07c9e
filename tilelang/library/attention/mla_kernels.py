"""The kernels of mla_decode: all heads attend to one latent vector per key, which is key and value at once.

mla_attention: a block computes 64 heads of one split of the work (mla_plan.py). The output of 64 x dim_v floats does not fit
one warp group, so two of them hold half of the columns each. The scores of a tile of 64 keys are computed by one of them, which
passes the weights to the other through shared memory: group 0 takes the even tiles, group 1 the odd ones. While one computes
its softmax, the tensor cores multiply for the other. The maximum of the scores passes from tile to tile, and so between groups.

The third group loads. A tile of latent vectors lies in shared memory as two halves of dim_v and the rotary part. Each is loaded
again as soon as the group that reads it last is done. The weights of a tile replace its rotary part, which only scores need.

Of a cache of float8, the third group loads the next pieces to registers behind the fence of the last ones, which waits for all
loads, and stores them as float16. The other groups scale the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tilelang.language as T

from .form import LOG2E
from .kernels import LN2, power_of_two
from .problem import whole

ROWS = KEYS = 64  # heads and keys of a tile
TILES = (ROWS, KEYS), (32, 32), (32, 16)  # of plain_attention: the first for which a block has room
PAIR = 2 * KEYS  # keys of an even and an odd tile: the unit in which work is divided
LOWEST = -1e30  # the first maximum; finite, so that rows without keys do not compute inf - inf
ROWS_EACH = 4  # rows of a tile that one of 128 threads gathers, with 7 others
REGS = 216, 72  # of a thread that multiplies, and of one that gathers or converts
MERGING = 16  # blocks that look for divided sequences, per head
AT_ONCE = 4  # splits of which a block loads the means at once


class MlaForm(NamedTuple):
    """What a kernel is compiled for. heads: rows, those of all queries of a sequence. queries: of a sequence. page: keys of a
    page, None without a table. kv_dtype: of the cache. splits: of the plan. divided: whether sequences may be. sparse: the
    table names the row of each key, or -1. tile: heads and keys, one of TILES."""

    heads: int
    queries: int
    dim_v: int
    rope: int
    page: int | None
    dtype: str
    kv_dtype: str
    splits: int
    divided: bool
    sparse: bool = False
    tile: tuple[int, int] = TILES[0]

    @property
    def narrow(self) -> bool:
        """Whether the cache has elements of 8 bits, which a warp group converts."""
        return self.kv_dtype != self.dtype

    @property
    def math(self) -> str:
        """The type of operands: float16 holds each float8, by one instruction for two of them."""
        return "float16" if self.narrow else self.dtype


class Tiles(NamedTuple):
    """Shared memory of a block: queries; two stages of keys, each in three pieces; `top` and `total` of both groups.

    full, free: barriers of the pieces of the stages (stage 0: 0 to 2). ready: of the weights of the stages. places: rows of the
    stages' keys in the cache, of sparse attention."""

    q: Any
    q_rope: Any
    left: Any
    right: Any
    rope: Any
    tops: Any
    norms: Any
    places: Any
    full: Any
    free: Any
    ready: Any
    q_full: Any
    q_free: Any


@T.macro
def span(Begins, Lengths, most, p, s):
    """The keys of sequence s, its pairs of tiles, and the range of them that belongs to split p. most: the keys of every
    sequence that the plan was made for; None: their lengths."""
    length = Lengths[s]
    pairs = T.max(1, T.ceildiv(length if most is None else most, PAIR))
    first = T.if_then_else(s == Begins[p, 0], Begins[p, 1], 0)
    last = T.if_then_else(s == Begins[p + 1, 0], Begins[p + 1, 1], pairs)
    return length, pairs, first, last


@T.macro
def mask(f, S, key, length, h, places, g):
    """Set the scores of keys that a row does not see to -inf. Query i of a sequence stands at position length - queries + i.
    places[g, :]: of sparse attention, the rows of the tile's keys, -1 for none."""
    for i, j in T.Parallel(*S.shape):
        if f.sparse:
            sees = places[g, j] >= 0
        else:
            sees = key + j < (length if f.queries == 1 else length - f.queries + 1 + (h + i) // (f.heads // f.queries))
        S[i, j] = T.if_then_else(sees, S[i, j], -T.infinity("float32"))


@T.macro
def weigh(S, P, state, c, most=None):
    """Raise `top` to the maximum of the scores; P = exp2(c (S - top)). factor: what earlier sums are multiplied by. most: the
    maximum of the scores, where it is known."""
    top, before, factor, total, more = state
    T.copy(top, before)
    if most is None:
        T.reduce_max(S, top, dim=1, clear=False)
    else:
        for i in T.Parallel(*top.shape):
            top[i] = T.max(top[i], most[i])
    for i in T.Parallel(*top.shape):
        factor[i] = T.exp2((before[i] - top[i]) * c)
    for i, j in T.Parallel(*S.shape):
        S[i, j] = T.exp2(S[i, j] * c - top[i] * c)
    T.reduce_sum(S, more, dim=1)
    for i in T.Parallel(*top.shape):
        total[i] = total[i] * factor[i] + more[i]
    T.copy(S, P)


@T.macro
def rescale(acc, factor):
    """Multiply the rows of acc by their factors."""
    for i, j in T.Parallel(*acc.shape):
        acc[i, j] *= factor[i]


@T.macro
def add_other(f, g, tiles, V, acc, state, c):
    """Take over the maximum of the other group's tile g, and issue acc += P V with its weights."""
    top, before, factor, total, _ = state
    T.copy(top, before)
    T.copy(tiles.tops[g, :], top)
    for i in T.Parallel(ROWS):
        factor[i] = T.exp2((before[i] - top[i]) * c)
        total[i] *= factor[i]
    rescale(acc, factor)
    if f.sparse:
        T.fence_proxy_async()  # behind the copies to V, which the other group waited for
    T.wgmma_gemm(tiles.rope[g, :, :], V[g, :, :], acc)


@T.macro
def raise_to(q, most):
    """most = max(most, |q|)."""
    for i, j in T.Parallel(*q.shape):
        most[i, j] = T.max(most[i, j], T.abs(T.cast(q[i, j], "float32")))


@T.macro
def scale_of(g, most, tops):
    """(p, 1 / p): the power of two in the largest of what both groups hold."""
    each, one = T.alloc_fragment((ROWS,), "float32"), T.alloc_fragment((1,), "float32")
    T.reduce_max(most, each, dim=1)
    T.reduce_max(each, one, dim=0)
    for j in T.Parallel(1):
        tops[g, j] = one[j]
    T.sync_threads(1, 256)
    return power_of_two(T.max(tops[0, 0], tops[1, 0]))


@T.macro
def store_queries(q, factor, scaled, tile):
    """Store queries to a tile, times a power of two."""
    for i, j in T.Parallel(*q.shape):
        scaled[i, j] = T.cast(T.cast(q[i, j], "float32") * factor, scaled.dtype)
    T.copy(scaled, tile)


def take_queries(f: MlaForm, g: int, tiles: Tiles, Q: Any, s: Any, h: Any) -> Any:
    """Store half of the queries of a sequence as float16, divided by the power of two in their largest, which is the result."""
    mine = [at for at in range(0, f.dim_v + f.rope, KEYS) if at // KEYS % 2 == g]
    held = [T.alloc_fragment((ROWS, KEYS), f.dtype) for _ in mine]
    most, scaled = T.alloc_fragment((ROWS, KEYS), "float32"), T.alloc_fragment((ROWS, KEYS), f.math)
    T.clear(most)
    for at, q in zip(mine, held):
        T.copy(Q[s, h:h + ROWS, at:at + KEYS], q)
    for q in held:
        raise_to(q, most)
    size, factor = scale_of(g, most, tiles.tops)
    for at, q in zip(mine, held):
        store_queries(q, factor, scaled, tiles.q[:, at:at + KEYS] if at < f.dim_v else tiles.q_rope)
    T.sync_threads(1, 256)
    return size


@T.macro
def score(f, g, tiles, S, phase):
    """Issue S = Q K^T of the tile in stage g, piece by piece as they come."""
    T.mbarrier_wait_parity(tiles.full[3 * g], phase)
    T.wgmma_gemm(tiles.q[:, 0:f.dim_v // 2], tiles.left[g, :, :], S, transpose_B=True, clear_accum=True)
    T.mbarrier_wait_parity(tiles.full[3 * g + 1], phase)
    T.wgmma_gemm(tiles.q[:, f.dim_v // 2:f.dim_v], tiles.right[g, :, :], S, transpose_B=True)
    T.mbarrier_wait_parity(tiles.full[3 * g + 2], phase)
    T.wgmma_gemm(tiles.q_rope, tiles.rope[g, :, :], S, transpose_B=True)


@T.macro
def finish(acc, state, c, unit):
    """acc becomes the mean of the values, in which the cache's elements count `unit`; `total` the logarithm of the sum."""
    top, _, factor, total, _ = state
    for i in T.Parallel(*top.shape):
        factor[i] = T.if_then_else(total[i] > 0, unit / total[i], 0.0)
    rescale(acc, factor)
    for i in T.Parallel(*top.shape):
        total[i] = T.if_then_else(total[i] > 0, (T.log2(total[i]) + top[i] * c) * LN2, -T.infinity("float32"))


@T.macro
def store(acc, total, means, logs, s, h, column):
    """Store rows to means[s, h + row, column:] and, from the first column on, the logarithms of sums to logs[s, h + row]."""
    for i, j in T.Parallel(*acc.shape):
        means[s, h + i, column + j] = acc[i, j]
    if column == 0:
        for i in T.Parallel(*total.shape):
            logs[s, h + i] = total[i]


@T.macro
def released(g, tiles, leaving):
    """Free half of stage 1 once the results in it, if there are some, have been read; 0: none are left."""
    if leaving > 0:
        T.tma_store_wait(0)
        T.mbarrier_arrive(tiles.free[3 + g])
    return 0


@T.macro
def consume(f, g, tiles, work, Q, scales, results):
    """Warp group g: the scores of its tiles, and its half of the columns of the result."""
    (Lengths, Begins, width, p, h), (scale, unit) = work, scales
    with T.ws(g):
        T.inc_max_nreg(REGS[0] if f.narrow or f.sparse else 240)
        c = T.alloc_var("float32", init=0.0) if f.narrow else scale
        S, P = T.alloc_fragment((ROWS, KEYS), "float32"), T.alloc_fragment((ROWS, KEYS), f.math)
        acc = T.alloc_fragment((ROWS, f.dim_v // 2), "float32")
        state = [T.alloc_fragment((ROWS,), "float32") for _ in (0, 1, 2, 3, 4)]  # top, before, factor, total, more
        top, _, factor, total, _ = state
        most = T.alloc_fragment((ROWS,), "float32")
        V = (tiles.left, tiles.right)[g]
        n, m = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)  # pairs of tiles and sequences so far
        leaving = T.alloc_var("int32", init=0)  # whether TMA may still read results
        for s in T.serial(Begins[p, 0], Begins[p + 1, 0] + T.cast(Begins[p + 1, 1] > 0, "int32")):
            length, pairs, first, last = span(Begins, Lengths, width, p, s)
            if f.narrow:
                c = scale * take_queries(f, g, tiles, Q, s, h)
            T.clear(acc)
            T.fill(top, LOWEST)
            T.clear(total)
            if not f.narrow:
                T.mbarrier_wait_parity(tiles.q_full[0], m % 2)
            for i in T.serial(first, last):
                if g == 1:
                    leaving = released(g, tiles, leaving)
                score(f, g, tiles, S, n % 2)
                if g == 0:
                    leaving = released(g, tiles, leaving)
                T.wait_wgmma(0)
                if not f.narrow:
                    if i == last - 1:
                        T.mbarrier_arrive(tiles.q_free[0])
                mask(f, S, (2 * i + g) * KEYS, length, h, tiles.places, g)
                T.reduce_max(S, most, dim=1)
                if g == 1:  # multiplied during the softmax
                    T.mbarrier_wait_parity(tiles.ready[0], n % 2)
                    add_other(f, 0, tiles, V, acc, state, c)
                weigh(S, P, state, c, most)
                if g == 1:
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(tiles.free[1])
                    T.mbarrier_arrive(tiles.free[2])
                T.copy(top, tiles.tops[g, :])
                T.copy(P, tiles.rope[g, :, :])
                T.fence_proxy_async()
                T.mbarrier_arrive(tiles.ready[g])
                rescale(acc, factor)
                T.wgmma_gemm(P, V[g, :, :], acc)
                T.wait_wgmma(0)
                if g == 0:
                    T.mbarrier_arrive(tiles.free[0])
                    T.mbarrier_wait_parity(tiles.ready[1], n % 2)
                    add_other(f, 1, tiles, V, acc, state, c)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(tiles.free[5])
                if i < last - 1:
                    T.mbarrier_arrive(tiles.free[3 + g])
                n = n + 1
            m = m + 1
            T.copy(total, tiles.norms[g, :])
            T.sync_threads(1, 256)
            for i in T.Parallel(ROWS):
                total[i] = tiles.norms[0, i] + tiles.norms[1, i]
            T.sync_threads(1, 256)
            finish(acc, state, c, 1.0 if f.narrow else unit)
            if last - first == pairs:
                T.copy(acc, V[1, :, :])
                if f.narrow:
                    for i, j in T.Parallel(ROWS, f.dim_v // 2):
                        results[0][s, h + i, g * f.dim_v // 2 + j] = T.cast(V[1, i, j], "float32") * unit
                else:
                    T.tma_copy(V[1, :, :], results[0][s, h:h + ROWS, g * f.dim_v // 2:(g + 1) * f.dim_v // 2])
                    leaving = 1
                if g == 0:
                    for r in T.Parallel(ROWS):
                        results[1][s, h + r] = total[r]
            elif f.divided:
                if f.narrow:
                    for i, j in T.Parallel(*acc.shape):
                        acc[i, j] *= unit
                store(acc, total, *results[2:], s + p, h, g * f.dim_v // 2)
            if last > first:
                if leaving == 0:
                    T.mbarrier_arrive(tiles.free[3 + g])
            elif not f.narrow:
                T.mbarrier_arrive(tiles.q_free[0])


def key_region(f: MlaForm, cache: tuple[Any, Any], s: Any, key: Any, length: Any) -> Callable[[int, int], Any]:
    """The region of some columns of the tile of keys from `key` on; behind the last key, of the last tile."""
    KV, Table = cache
    k = T.bind(T.max(T.min(key, length - 1), 0) // KEYS * KEYS)
    at = T.bind(s if f.page is None else T.if_then_else(length > 0, Table[s, k // f.page], 0))
    r = k if f.page is None else k % f.page
    return lambda first, end: KV[at, r:r + KEYS, first:end]


def columns_of(f: MlaForm) -> tuple[tuple[int, int], ...]:
    """First and end of the columns of the three pieces of a tile."""
    half = f.dim_v // 2
    return (0, half), (half, f.dim_v), (f.dim_v, f.dim_v + f.rope)


@T.macro
def load(source, tile, g, tiles, piece, phase):
    """Load a piece of the keys of stage g as soon as it is free."""
    T.mbarrier_wait_parity(tiles.free[3 * g + piece], phase)
    T.tma_copy(source, tile[g, :, :], barrier=tiles.full[3 * g + piece])
    T.mbarrier_arrive(tiles.full[3 * g + piece])


def load_keys(f: MlaForm, g: int, tiles: Tiles, region: Any, phase: Any) -> None:
    """Load a tile of keys to stage g, piece by piece."""
    for piece, (columns, tile) in enumerate(zip(columns_of(f), (tiles.left, tiles.right, tiles.rope))):
        load(region(*columns), tile, g, tiles, piece, phase)


def chunks(f: MlaForm, rest: int) -> list[tuple[int, int]]:
    """(piece, first column) of the chunks of 64 columns that are in registers at once, before the fence in front of an arrival,
    which waits for all loads: first those of the left piece, then of the others."""
    return [(n, at) for n, (first, end) in enumerate(columns_of(f)) if (n > 0) == rest for at in range(first, end, KEYS)]


def fetch(f: MlaForm, rest: int, held: Any, region: Any) -> None:
    """Load some pieces of a tile of float8 to registers."""
    for tile, (_, at) in zip(held, chunks(f, rest)):
        T.copy(region(at, at + KEYS), tile)


def convert_pair(f: MlaForm, tiles: Tiles, held: Any, regions: Any, phase: Any) -> None:
    """Convert a pair of tiles to both stages, each piece as soon as it is free. regions: of the tiles, and of the one behind
    them."""
    pieces = tiles.left, tiles.right, tiles.rope
    for g, rest in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for mine, (piece, at) in zip(held, chunks(f, rest)):
            first, end = columns_of(f)[piece]
            if at == first:
                T.mbarrier_wait_parity(tiles.free[3 * g + piece], phase)
            T.copy(mine, pieces[piece][g, :, at - first:at - first + KEYS])
            if at + KEYS == end:
                T.fence_proxy_async()
                T.mbarrier_arrive(tiles.full[3 * g + piece])
        fetch(f, 1 - rest, held, regions[g + rest])


@T.macro
def gather_piece(KV, begin, tile, g, tiles, piece, phase, rows, at, t):
    """Copy the columns from `begin` on of the rows of thread t to a piece of stage g; zeros for -1. at: the first element of
    each row that the thread copies. Elements are counted in one dimension, so that addresses are at[r] and a constant."""
    elements = T.reshape(KV, (KV.shape[0] * KV.shape[1] * KV.shape[2],))
    if piece > 0:
        T.mbarrier_wait_parity(tiles.free[3 * g + piece], phase)
    for c in T.unroll(tile.shape[2] // 64):
        for r in T.unroll(ROWS_EACH):
            T.ptx_cp_async(T.access_ptr(tile[g, t // 8 + KEYS // ROWS_EACH * r, c * 64 + t % 8 * 8], "w", 8),
                           T.access_ptr(elements[at[r] + (begin + c * 64)], "r", 8), 8, rows[r] >= 0)
    T.cp_async_barrier_noinc(tiles.full[3 * g + piece])


@T.macro
def named(Table, s, key, count, rows):
    """The rows that a thread copies of the tile of keys from `key` on: -1 for none, and behind the first `count`."""
    t = T.get_thread_binding() - 256
    for r in T.unroll(ROWS_EACH):
        at = key + t // 8 + KEYS // ROWS_EACH * r
        rows[r] = T.if_then_else(at < count, Table[s, T.min(at, Table.shape[1] - 1)], -1)


@T.macro
def gather(g, tiles, cache, s, key, count, phase, held):
    """Copy the rows that entries `key` on of Table[s] name to stage g, with zeros for -1 and behind the first `count`.

    held: (rows, ahead, at). ahead: the rows of this tile; afterwards, of the next. at: their first elements."""
    (KV, Table), (rows, ahead, at) = cache, held
    # The number of a thread comes from a shuffle, so that no loop keeps the 36 addresses in shared memory that depend on it:
    # ptxas of CUDA 13.0 spills them, and loads each in front of its copy.
    t = T.bind(T.shfl_sync(T.get_thread_binding() - 256, T.get_lane_idx()))
    for r in T.unroll(ROWS_EACH):
        rows[r] = ahead[r]
        at[r] = T.cast(T.max(ahead[r], 0), "int64") * KV.shape[2] + t % 8 * 8
    named(Table, s, key + KEYS, count, ahead)
    T.mbarrier_wait_parity(tiles.free[3 * g], phase)
    if t % 8 == 0:
        for r in T.unroll(ROWS_EACH):
            tiles.places[g, t // 8 + KEYS // ROWS_EACH * r] = rows[r]
    T.mbarrier_arrive(tiles.full[3 * g])  # the places; the copies arrive too
    gather_piece(KV, 0, tiles.left, g, tiles, 0, phase, rows, at, t)
    gather_piece(KV, tiles.left.shape[2], tiles.right, g, tiles, 1, phase, rows, at, t)
    gather_piece(KV, 2 * tiles.left.shape[2], tiles.rope, g, tiles, 2, phase, rows, at, t)


@T.macro
def produce(f, tiles, work, Q, cache):
    """Warp group 2: load the queries and keys of all sequences of a split."""
    Lengths, Begins, most, p, h = work
    with T.ws(2):
        T.dec_max_nreg(REGS[1] if f.narrow or f.sparse else 24)
        held = [T.alloc_fragment((KEYS, KEYS), f.kv_dtype) for _ in chunks(f, 1)] if f.narrow else ()
        rows = [T.alloc_local((ROWS_EACH,), dtype) for dtype in ("int32", "int32", "int64")] if f.sparse else ()
        n, m = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
        for s in T.serial(Begins[p, 0], Begins[p + 1, 0] + T.cast(Begins[p + 1, 1] > 0, "int32")):
            length, _, first, last = span(Begins, Lengths, most, p, s)
            if not f.narrow:
                T.mbarrier_wait_parity(tiles.q_free[0], (m + 1) % 2)
                T.tma_copy(Q[s, h:h + ROWS, 0:f.dim_v], tiles.q, barrier=tiles.q_full[0])
                T.tma_copy(Q[s, h:h + ROWS, f.dim_v:f.dim_v + f.rope], tiles.q_rope, barrier=tiles.q_full[0])
                T.mbarrier_arrive(tiles.q_full[0])
                m = m + 1
            if f.sparse:
                named(cache[1], s, first * PAIR, length, rows[1])
            if f.narrow:
                fetch(f, 0, held, key_region(f, cache, s, first * PAIR, length))
            for i in T.serial(first, last):
                if f.sparse:
                    gather(0, tiles, cache, s, i * PAIR, length, (n + 1) % 2, rows)
                    gather(1, tiles, cache, s, i * PAIR + KEYS, length, (n + 1) % 2, rows)
                elif f.narrow:
                    convert_pair(f, tiles, held, [key_region(f, cache, s, i * PAIR + k * KEYS, length) for k in (0, 1, 2)],
                                 (n + 1) % 2)
                else:
                    load_keys(f, 0, tiles, key_region(f, cache, s, i * PAIR, length), (n + 1) % 2)
                    load_keys(f, 1, tiles, key_region(f, cache, s, i * PAIR + KEYS, length), (n + 1) % 2)
                n = n + 1


@T.macro
def merge(f, Means, Sums, Spans, O, LSE, h, s):
    """O[s, h, :] from the means of all splits that sequence s is divided into, weighted by their sums."""
    slot, count = s + Spans[s, 0], Spans[s, 1] - Spans[s, 0] + 1
    logs, weights = T.alloc_fragment((f.splits,), "float32"), T.alloc_shared((f.splits,), "float32")
    top, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
    sums, mean = T.alloc_fragment((AT_ONCE, f.dim_v), "float32"), T.alloc_fragment((f.dim_v,), "float32")
    if count > 1:
        for k in T.Parallel(f.splits):
            logs[k] = T.if_then_else(k < count, Sums[slot + T.min(k, count - 1), h], -T.infinity("float32"))
        T.reduce_max(logs, top, dim=0)
        for k in T.Parallel(f.splits):
            logs[k] = T.if_then_else(top[0] > LOWEST, T.exp2((logs[k] - top[0]) * LOG2E), 0.0)
        T.reduce_sum(logs, total, dim=0)
        T.copy(logs, weights)
        T.clear(sums)
        for k in T.serial(T.ceildiv(count, AT_ONCE)):
            for i, j in T.Parallel(AT_ONCE, f.dim_v):
                n = T.min(k * AT_ONCE + i, count - 1)
                sums[i, j] += T.if_then_else(k * AT_ONCE + i < count, weights[n], 0.0) * Means[slot + n, h, j]
        T.reduce_sum(sums, mean, dim=0)
        for j in T.Parallel(f.dim_v):
            O[s, h, j] = T.if_then_else(total[0] > 0, mean[j] / total[0], 0.0)
        for j in T.Parallel(1):
            LSE[s, h] = top[j] + T.log2(total[j]) * LN2


def mla_attention(f: MlaForm) -> Any:
    """The kernel for wgmma and TMA: (Q, KV, Table, Lengths, scale, unit, Begins, Spans, Means, Sums, O, LSE).

    Q (batch, heads, dim); KV (pages, page, dim) with Table (batch, width), or without a table KV (batch, rows, dim), where
    sparse (1, rows, dim); Lengths (batch,); Begins, Spans: of the plan; unit: what an element of KV counts in the result
    (`scale` holds it already). Means (slots, heads, dim_v) and Sums (slots, heads), float32, are workspace: slot s + p is for
    split p of sequence s.
    """
    half, dim = f.dim_v // 2, f.dim_v + f.rope
    batch, pages, width, rows, slots = T.dynamic("batch, pages, width, rows, slots")

    @T.prim_func
    def mla_decode(Q: T.Tensor((batch, f.heads, dim), f.dtype), KV: T.Tensor((pages, f.page or rows, dim), f.kv_dtype),
                   Table: T.Tensor((batch, width), "int32"), Lengths: T.Tensor((batch,), "int32"),
                   scale: T.float32, unit: T.float32,
                   Begins: T.Tensor((f.splits + 1, 2), "int32"), Spans: T.Tensor((batch, 2), "int32"),
                   Means: T.Tensor((slots, f.heads, f.dim_v), "float32"), Sums: T.Tensor((slots, f.heads), "float32"),
                   O: T.Tensor((batch, f.heads, f.dim_v), f.dtype), LSE: T.Tensor((batch, f.heads), "float32")):
        with T.Kernel(T.ceildiv(f.heads, ROWS), f.splits, threads=384) as (hb, p):
            q, q_rope = T.alloc_shared((ROWS, f.dim_v), f.math), T.alloc_shared((ROWS, f.rope), f.math)
            left, right = T.alloc_shared((2, KEYS, half), f.math), T.alloc_shared((2, KEYS, half), f.math)
            rope = T.alloc_shared((2, KEYS, f.rope), f.math)
            tops, norms = T.alloc_shared((2, ROWS), "float32"), T.alloc_shared((2, ROWS), "float32")
            places = T.alloc_shared((2, KEYS), "int32") if f.sparse else tops
            full = T.alloc_barrier([256 if f.sparse else 128, 128, 128] * 2)
            free, ready = T.alloc_barrier([128] * 6), T.alloc_barrier([128] * 2)
            q_full, q_free = T.alloc_barrier([128]), T.alloc_barrier([256])
            tiles = Tiles(q, q_rope, left, right, rope, tops, norms, places, full, free, ready, q_full, q_free)
            most = width if f.sparse and f.divided else None
            work, scales = (Lengths, Begins, most, p, hb * ROWS), (scale * LOG2E, unit)
            produce(f, tiles, work, Q, (KV, Table))
            consume(f, 0, tiles, work, Q, scales, (O, LSE, Means, Sums))
            consume(f, 1, tiles, work, Q, scales, (O, LSE, Means, Sums))
        if f.divided:
            with T.Kernel(f.heads, MERGING, threads=128) as (h, y):
                for k in T.serial(T.ceildiv(batch - y, MERGING)):
                    merge(f, Means, Sums, Spans, O, LSE, h, k * MERGING + y)

    return mla_decode


def plain_attention(f: MlaForm) -> Any:
    """The kernel for other machines and sizes, where a block computes some heads over all keys. Parameters as mla_attention."""
    dim, (rows, columns) = f.dim_v + f.rope, f.tile
    wide, wide_v = whole(dim), whole(f.dim_v)  # columns of tiles: behind those of the tensors there are zeros
    batch, pages, width, capacity = T.dynamic("batch, pages, width, rows")

    @T.prim_func
    def mla_decode(Q: T.Tensor((batch, f.heads, dim), f.dtype), KV: T.Tensor((pages, f.page or capacity, dim), f.kv_dtype),
                   Table: T.Tensor((batch, width), "int32"), Lengths: T.Tensor((batch,), "int32"),
                   scale: T.float32, unit: T.float32,
                   O: T.Tensor((batch, f.heads, f.dim_v), f.dtype), LSE: T.Tensor((batch, f.heads), "float32")):
        with T.Kernel(T.ceildiv(f.heads, rows), batch, threads=4 * rows) as (hb, s):
            q, keys = T.alloc_shared((rows, wide), f.dtype), T.alloc_shared((columns, wide), f.dtype)
            S, P = T.alloc_fragment((rows, columns), "float32"), T.alloc_shared((rows, columns), f.dtype)
            acc = T.alloc_fragment((rows, wide_v), "float32")
            places = T.alloc_shared((1, columns), "int32") if f.sparse else None
            state = [T.alloc_fragment((rows,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[s, hb * rows:(hb + 1) * rows, 0:wide], q)
            T.clear(acc)
            T.fill(state[0], LOWEST)
            T.clear(state[3])
            for i in T.Pipelined(T.ceildiv(Lengths[s], columns), num_stages=1):
                k = i * columns
                if f.sparse:
                    for j in T.Parallel(columns):
                        places[0, j] = T.if_then_else(k + j < Lengths[s], Table[s, T.min(k + j, Lengths[s] - 1)], -1)
                    for j, d in T.Parallel(columns, wide):
                        keys[j, d] = T.if_then_else(places[0, j] >= 0, KV[0, T.max(places[0, j], 0), d], 0)
                else:
                    T.copy(KV[s if f.page is None else Table[s, k // f.page], k if f.page is None else k % f.page, 0], keys)
                T.gemm(q, keys, S, transpose_B=True, clear_accum=True)
                mask(f, S, k, Lengths[s], hb * rows, places, 0)
                weigh(S, P, state, scale * LOG2E)
                rescale(acc, state[2])
                T.gemm(P, keys[:, 0:wide_v], acc)
            finish(acc, state, scale * LOG2E, unit)
            store(acc, state[3], O, LSE, s, hb * rows, 0)

    return mla_decode
