"""The kernel of flash_decode: few queries per sequence attend to many cached keys, which several blocks divide (split-KV).

The queries of all heads that read one kv head are the rows of one tile, so K and V are read once for all of them; reading them
takes most of the time of a decode step. `splits` blocks divide the keys of a sequence. Each stores its weighted mean and the
logarithm of its sum, and a second launch merges them. With one split the first launch writes the result itself.

Keys lie in pages that a table names, in any order; a tile of keys lies in one page, or has several. See kernels.py for the
running maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.target.machine import REGISTERS_PER_SM

from .decode_plan import WHOLE
from .decode_problem import DecodeSizes
from .decode_wide import attend_groups, finish, load_terms, padded
from .form import LOG2E, DecodeForm, Tile
from .kernels import LAG, KeyTiles, attend, fetch, power_of_two, reset, working_set


@T.macro
def merge_splits(f, Means, Sums, O, LSE, splits, first, b):
    """Compute rows of O[b] from `first` on (of query i and head h: i * heads + h) from the means of all splits, weighted by
    their sums. Sums holds the logarithms; -inf: no key seen."""
    rows, heads, queries = merged_rows(f), f.sizes.heads, f.sizes.seq_q
    mean = T.alloc_fragment((rows, f.dim_v), "float32")
    top, total, weight = [T.alloc_fragment((rows,), "float32") for _ in (0, 1, 2)]
    T.fill(top, -T.infinity("float32"))
    for s in T.serial(splits):
        for r in T.Parallel(rows):
            n = T.min(first + r, queries * heads - 1)
            top[r] = T.max(top[r], Sums[s, b, n % heads, n // heads])
    for r in T.Parallel(rows):
        top[r] = T.if_then_else(top[r] == -T.infinity("float32"), 0.0, top[r])
    T.clear(mean)
    T.clear(total)
    for s in T.serial(splits):
        for r in T.Parallel(rows):
            n = T.min(first + r, queries * heads - 1)
            weight[r] = T.exp2((Sums[s, b, n % heads, n // heads] - top[r]) * LOG2E)
            total[r] += weight[r]
        for r, j in T.Parallel(rows, f.dim_v):
            n = T.min(first + r, queries * heads - 1)
            mean[r, j] += weight[r] * Means[s, b, n // heads, n % heads, j]
    for r, j in T.Parallel(rows, f.dim_v):
        n = first + r
        if n < queries * heads:
            O[b, n // heads, n % heads, j] = T.if_then_else(total[r] == 0, 0.0, mean[r, j] / total[r])
    if f.with_lse:
        for r in T.Parallel(rows):
            n = first + r
            if n < queries * heads:
                LSE[b, n % heads, n // heads] = top[r] + T.log2(total[r]) / LOG2E


MERGING = 528  # blocks that merge pieces: four of an SM, of 132
LOGS, AT_ONCE = 32, 8  # pieces whose logarithms, and whose means, a block loads at once


@T.macro
def merge_pieces(f, Means, Sums, O, LSE, first, spanned):
    """`merge_splits` for a sequence that a plan divides. spanned: the sequence, the place of its first piece, their number."""
    rows, heads, queries, dim_v = few_rows(f), f.sizes.heads, f.sizes.seq_q, f.dim_v
    b, begin, count = spanned
    logs = T.alloc_fragment((LOGS, rows), "float32")
    top, whole = [T.alloc_fragment((rows,), "float32") for _ in (0, 1)]
    weight, total = [T.alloc_fragment((AT_ONCE, rows), "float32") for _ in (0, 1)]
    mean, out = T.alloc_fragment((AT_ONCE, rows, dim_v), "float32"), T.alloc_fragment((rows, dim_v), "float32")
    T.fill(top, -T.infinity("float32"))
    for s in T.serial(T.ceildiv(count, LOGS)):
        for i, r in T.Parallel(LOGS, rows):
            n = T.min(first + r, queries * heads - 1)
            logs[i, r] = Sums[begin + T.min(s * LOGS + i, count - 1), n % heads, n // heads]
        T.reduce_max(logs, top, dim=0, clear=False)
    for r in T.Parallel(rows):
        top[r] = T.if_then_else(top[r] == -T.infinity("float32"), 0.0, top[r])
    T.clear(mean)
    T.clear(total)
    for s in T.serial(T.ceildiv(count, AT_ONCE)):
        for i, r in T.Parallel(AT_ONCE, rows):
            n = T.min(first + r, queries * heads - 1)
            at = s * AT_ONCE + i
            log = Sums[begin + T.min(at, count - 1), n % heads, n // heads]
            weight[i, r] = T.if_then_else(at < count, T.exp2((log - top[r]) * LOG2E), 0.0)
            total[i, r] += weight[i, r]
        for i, r, j in T.Parallel(AT_ONCE, rows, dim_v):
            n = T.min(first + r, queries * heads - 1)
            if s * AT_ONCE + i < count:
                mean[i, r, j] += weight[i, r] * Means[begin + s * AT_ONCE + i, n // heads, n % heads, j]
    T.reduce_sum(mean, out, dim=0)
    T.reduce_sum(total, whole, dim=0)
    for r, j in T.Parallel(rows, dim_v):
        n = first + r
        if n < queries * heads:
            O[b, n // heads, n % heads, j] = T.if_then_else(whole[r] == 0, 0.0, out[r, j] / whole[r])
    if f.with_lse:
        for r in T.Parallel(rows):
            n = first + r
            if n < queries * heads:
                LSE[b, n % heads, n // heads] = top[r] + T.log2(whole[r]) / LOG2E


def few_rows(f: DecodeForm) -> int:
    """Rows of which a block merges pieces: 512 threads have 8 elements each."""
    return max(1, 4096 // (AT_ONCE * f.dim_v))


def merged_rows(f: DecodeForm) -> int:
    """Rows that a block merges: 8 elements for each of 128 threads."""
    return max(1, 1024 // f.dim_v)


@T.macro
def load_queries(f, Qs, Q, b, h, row, factor):
    """Load the queries of the tile that starts at `row`, in the order of `store`; zeros behind the last query."""
    rows, dim = Qs.shape
    for i, j in T.Parallel(rows, dim):
        r = row + i
        q = T.if_then_else(r < f.used, Q[b, r // f.group, h * f.group + r % f.group, j], T.cast(0, f.dtype))
        Qs[i, place_of(j) if f.narrow else j] = q if f.math == f.dtype else T.cast(T.cast(q, "float32") * factor, f.math)


@T.macro
def magnitude(f, Q, b, h, row):
    """(x, 1 / x): the power of two in the largest query of a tile. Queries over x are float16, whatever their exponents."""
    if f.math == f.dtype and not f.wide:
        return 1.0, 1.0
    rows = 64 if f.wide else f.tile.rows
    q, most = T.alloc_fragment((rows, f.dim), "float32"), T.alloc_fragment((rows,), "float32")
    largest = T.alloc_fragment((1,), "float32")
    for i, j in T.Parallel(rows, f.dim):
        r = T.min(row + i, f.used - 1)
        q[i, j] = T.abs(T.cast(Q[b, r // f.group, h * f.group + r % f.group, j], "float32"))
    T.reduce_max(q, most, dim=1)
    T.reduce_max(most, largest, dim=0)
    return power_of_two(largest[0])


@T.macro
def visible(f, key, position):
    """Whether a query at key position `position` sees `key`."""
    sees = key <= position if f.left is None else T.And(key <= position, key >= position - f.left)
    return sees


# The order of the elements of K's rows and of V's columns in operands, which is free. A thread of a GEMM holds columns 2q,
# 2q + 1, 2q + 8 and 2q + 9 of sixteen, and rows g, g + 8, g + 64 and g + 72: they become four bytes side by side, one load.


def column_at(j: Any) -> Any:
    """The element of a row of K and Q at place j of an operand."""
    return j // 16 * 16 + j % 8 // 2 * 4 + j // 8 % 2 * 2 + j % 2


def place_of(column: Any) -> Any:
    """The place of an element of a row of K and Q in an operand: column_at(place_of(n)) = n."""
    return column // 16 * 16 + column // 2 % 2 * 8 + column % 16 // 4 * 2 + column % 2


def row_at(j: Any, dim: int) -> Any:
    """The column of V, which has `dim`, at row j of the transposed operand; behind the last, where wgmma takes 64 rows, any."""
    if dim % 128:
        return j // 16 % (dim // 16) * 16 + j % 8 * 2 + j % 16 // 8
    return j // 128 * 128 + j % 64 // 16 * 32 + j % 8 * 4 + j % 128 // 64 * 2 + j % 16 // 8


def piece(n: int, most: int) -> int:
    """The largest multiple of 16 that divides n, up to `most`; at least 16."""
    return max(d for d in range(16, n + 1, 16) if n % d == 0 and d <= max(16, most))


def narrow_blocks(sizes: DecodeSizes, tile: Tile, latent: bool = False, wide: bool = False) -> int:
    """Blocks of narrow caches for which an SM of sm_90 has room: they hide the latencies of each other."""
    dim, dim_v, rows, keys = *sizes.columns, tile.rows, tile.keys
    if wide:
        return 2 if rows == 64 else 1
    registers = (dim_v + keys) * rows // tile.threads + (16 if wide else rows // 2) + max(40, 24 + dim_v // 16)
    own = rows * dim * 2 + 2 * keys * (dim_v if wide else rows)
    shared = own + tile.stages * keys * (dim if latent else padded(dim) + padded(dim_v)) + 1024
    return max(1, min(6, REGISTERS_PER_SM // (tile.threads * registers), (228 << 10) // shared))


def hides_keys(f: DecodeForm, k: Any, row: Any, at: Any) -> Any:
    """Whether a query of the tile from `row` on does not see all keys of tile k. at: the first query's position."""
    keys = f.tile.keys
    ends = (k + 1) * keys > at + row // f.group + 1
    return ends if f.left is None else T.Or(ends, k * keys < at + (row + f.tile.rows - 1) // f.group - f.left)


@T.macro
def convert(tile, i, j, out):
    """out[a, b] = tile[i(a), j(b)]."""
    for a, b in T.Parallel(*out.shape):
        out[a, b] = T.cast(tile[i(a), j(b)], out.dtype)


def add_scores(Ks: Any, Qs: Any, columns: tuple[int, int], held: list[Any], S: Any) -> None:
    """S += Ks Qs^T for a range of columns of Q, which are the first of K. held: operands of GEMMs in registers; while one is
    multiplied, the next one is converted."""
    d, (begin, end) = held[0].shape[1], columns
    for n in range((end - begin) // d):
        K = held[n % len(held)]
        convert(Ks, lambda i: i, lambda j, n=n: n * d + column_at(j), K)
        T.gemm(K, Qs[:, begin + n * d:begin + (n + 1) * d], S, transpose_B=True)


def add_values(Vs: Any, dim_v: int, P: Any, held: list[Any], acc: Any, before: Callable[[], None]) -> None:
    """acc += Vs^T P for the first dim_v columns of V. held: as add_scores takes it. before: runs behind the conversion of the
    first operand."""
    keys, few = Vs.shape[0], held[0].shape[0]
    for n in range(keys // few):
        V = held[n % len(held)]
        convert(Vs, lambda i, n=n: n * few + i, lambda j: row_at(j, dim_v), V)
        if n == 0:
            before()
        T.gemm(V, P[n * few:(n + 1) * few, :], acc, transpose_A=True)


@T.macro
def weigh(S, acc, state, limits):
    """Scores become weights, which are added to `total`. Columns of S and acc are rows of the tile. limits: (c, LAG / c).

    Where a vote finds a row whose scores are LAG / c above it, `top` rises, and sums are rescaled."""
    (top, before, factor, total, highest, over, most), (c, limit) = state, limits
    T.reduce_max(S, highest, dim=0)
    for i in T.Parallel(*top.shape):
        over[i] = highest[i] - top[i]
    T.reduce_max(over, most, dim=0)
    if most[0] > limit:
        T.copy(top, before)
        T.reduce_max(S, top, dim=0)
        for i in T.Parallel(*top.shape):
            top[i] = T.if_then_else((top[i] - before[i]) * c > LAG, top[i], before[i])
        for i in T.Parallel(*top.shape):
            factor[i] = T.exp2((before[i] - top[i]) * c)
        for i in T.Parallel(*top.shape):
            total[i] *= factor[i]
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] *= factor[j]
    for i, j in T.Parallel(*S.shape):
        S[i, j] = T.exp2(S[i, j] * c - top[j] * c)
    T.reduce_sum(S, total, dim=0, clear=False)


@T.macro
def attend_narrow(f, load, c, unit, tiles, hides):
    """`attend` for caches of float8, whose elements of V count `unit`: (weighted means, logarithms of sums), rows in columns.

    S^T = K Q^T and acc^T = V^T P^T: keys and dimensions are the rows, so the converted tiles of K and V are first operands,
    which may lie in registers. Where they passed through shared memory, a block waited for its threads four times a tile.
    """
    (rows, keys), dim, dim_v = (f.tile.rows, f.tile.keys), f.dim, f.dim_v
    Qs, P = T.alloc_shared((rows, dim), f.math), T.alloc_shared((keys, rows), f.math)
    Ks = T.alloc_shared((keys, dim - dim_v if f.latent else padded(dim)), f.kv_dtype)
    Vs = T.alloc_shared((keys, dim_v if f.latent else padded(dim_v)), f.kv_dtype)
    height = -(-dim_v // 64) * 64
    held = [[T.alloc_fragment((keys, piece(dim - dim_v if f.latent else dim, 32)), f.math) for _ in (0, 1)],
            [T.alloc_fragment((piece(keys, 2048 // dim_v), height), f.math) for _ in range(2 if dim_v <= 256 else 1)]]
    S, acc = T.alloc_fragment((keys, rows), f.accum), T.alloc_fragment((height, rows), f.accum)
    top, before, factor, total, highest, over = [T.alloc_fragment((rows,), f.accum) for _ in range(6)]
    most = T.alloc_fragment((1,), f.accum)
    limit = LAG / c
    load(Qs)
    reset(acc, top, total, c)
    for k in T.Pipelined(tiles.begin, tiles.end, num_stages=f.tile.stages):
        key = tiles.place(k)
        fetch(tiles.keys(key), Ks)
        fetch(tiles.values(key), Vs)
        T.clear(S)
        if f.latent:
            add_scores(Vs, Qs, (0, dim_v), held[0], S)
        add_scores(Ks, Qs, (dim_v if f.latent else 0, dim), held[0], S)
        if hides(k):
            for j, i in T.Parallel(keys, rows):
                S[j, i] = T.if_then_else(tiles.visible(k, key, i, j), S[j, i], -T.infinity(f.accum))
        weigh(S, acc, (top, before, factor, total, highest, over, most), (c, limit))
        add_values(Vs, dim_v, P, held[1], acc, lambda: T.copy(S, P))
    finish(acc, total, (top, factor), c, unit, 0)
    return acc, total


@T.macro
def store(f, acc, total, results, at, h, row, with_log):
    """Store the rows of a tile that are queries: acc to mean[*at, query, head, :], total to log[*at, head, query].

    results: (mean, log). Row r of the tile that starts at `row` is query r // group of head h * group + r % group; where caches
    are narrow, rows are the columns of acc.
    """
    mean, log = results
    for i, j in T.Parallel(*acc.shape):
        r, d = (row + j, row_at(i, f.dim_v)) if f.columns else (row + i, j)
        if r < f.used if not f.columns else T.And(r < f.used, i < f.dim_v):
            mean[(*at, r // f.group, h * f.group + r % f.group, d)] = acc[i, j]
    if with_log:
        for i in T.Parallel(*total.shape):
            r = row + i
            if r < f.used:
                log[(*at, h * f.group + r % f.group, r // f.group)] = total[i]


class Types(NamedTuple):
    """The types of the tensors of a kernel. logs: LSE."""

    queries: Any
    result: Any
    logs: Any
    k_cache: Any
    v_cache: Any
    table: Any


def types_of(f: DecodeForm) -> Types:
    """The types of a form's tensors."""
    batch, seq_q, heads, kv_heads, dim, dim_v, pages, page_size, width = f.sizes
    cache = (pages, width if page_size is None else page_size, kv_heads)
    return Types(T.Tensor((batch, seq_q, heads, dim), f.dtype), T.Tensor((batch, seq_q, heads, dim_v), f.dtype),
                 T.Tensor((batch, heads, seq_q) if f.with_lse else (1,), "float32"),
                 T.StridedTensor((*cache, dim), f.strides[0], f.kv_dtype),
                 T.Tensor((1,), f.kv_dtype) if f.latent else T.StridedTensor((*cache, dim_v), f.strides[1], f.kv_dtype),
                 T.Tensor((1, 1) if page_size is None else (batch, width), "int32"))


def key_range(f: DecodeForm, caches: tuple[Any, Any, Any], place: tuple[Any, Any, Any], at: Any, span: Any) -> KeyTiles:
    """The tiles of keys of a span. caches: (K, V, Table)."""
    (K, V, Table), (b, h, row), dim, dim_v = caches, place, f.dim, f.dim_v
    latent = slice(dim_v, dim), slice(0, dim_v)
    whole = [slice(0, padded(n) if f.narrow else n) for n in (dim, dim_v)]
    tiles = [(K, n) for n in latent] if f.latent else list(zip((K, V), whole))
    keys_of, values_of = (lambda at, x=x: f.rows(x[0], b, h, at, x[1]) for x in tiles)
    return KeyTiles(*span, lambda k: f.place(Table, b, k, at + f.sizes.seq_q), keys_of, values_of,
                    lambda k, _, i, j: visible(f, k * f.tile.keys + j, at + (row + i) // f.group))


@T.macro
def load_scaled(f, Qs, Q, b, h, row):
    """Load 64 queries as sums of float8; what they are divided by."""
    size, factor = magnitude(f, Q, b, h, row)
    load_terms(f, Qs, Q, b, h, row, factor)
    return size


@T.macro
def attended(f, Q, caches, work, scales, place, at, span, put):
    """`put` the means and logarithms of the tile of queries at `place`, a sequence, a kv head and a row, over the tiles of a
    span."""
    (b, h, row), (c, unit) = place, scales
    if f.wide:
        attend_groups(f, lambda Qs, g: load_scaled(f, Qs, Q, b, h, row + g), scales,
                      lambda g: key_range(f, caches, (b, h, row + g), at, span),
                      lambda g: lambda k: hides_keys(f, k, row + g, at), put)
    else:
        size, factor = magnitude(f, Q, b, h, row)
        load, tiles = lambda Qs: load_queries(f, Qs, Q, b, h, row, factor), key_range(f, caches, place, at, span)
        if f.narrow:
            acc, total = attend_narrow(f, load, c * size, unit, tiles, lambda k: hides_keys(f, k, row, at))
        else:
            acc, total = attend(f, work, load, c, tiles)
        put(acc, total, 0)


@T.macro
def store_item(f, acc, total, results, place, h, row, g):
    """Store an item of a plan."""
    b, slot = place
    if slot == WHOLE:
        store(f, acc, total, results[:2], (b,), h, row + g, f.with_lse)
    elif slot >= 0:
        store(f, acc, total, results[2:], (slot,), h, row + g, True)


def planned_attention(f: DecodeForm) -> Any:
    """The kernel of decode_attention for a plan: Items and Divided (decode_plan.py) stand in place of Lengths, Means (slots,
    seq_q, heads, dim_v) and Sums (slots, heads, seq_q) hold the pieces of divided sequences."""
    (_, seq_q, heads, kv_heads, _, dim_v, *_), rows = f.sizes, f.tile.rows
    blocks = -(-f.used // rows)
    queries, result, logs, k_cache, v_cache, table = types_of(f)
    items, parted, slots = T.dynamic("items, parted, slots")

    @T.prim_func
    def planned_decode(Q: queries, K: k_cache, V: v_cache, Table: table, Items: T.Tensor((items, 5), "int32"),
                       Divided: T.Tensor((parted, 3), "int32"), scale: T.float32, unit: T.float32,
                       Means: T.Tensor((slots, seq_q, heads, dim_v), "float32"),
                       Sums: T.Tensor((slots, heads, seq_q), "float32"), O: result, LSE: logs):
        with T.Kernel(kv_heads * blocks, items, threads=f.tile.threads) as (hb, n):
            if f.narrow:
                T.annotate_min_blocks_per_sm(narrow_blocks(f.sizes, f.tile, f.latent, f.wide))
            b, slot = T.bind(Items[n, 0]), T.bind(Items[n, 4])
            work = None if f.narrow else working_set(f)
            place = b, hb // blocks, hb % blocks * rows
            attended(f, Q, (K, V, Table), work, (scale * LOG2E, unit), place, Items[n, 1] - seq_q, (Items[n, 2], Items[n, 3]),
                     lambda acc, total, g: store_item(f, acc, total, (O, LSE, Means, Sums), (b, slot), *place[1:], g))
        tiles = -(-heads * seq_q // few_rows(f))
        at_once = max(1, MERGING // tiles)  # sequences that are merged at the same time
        with T.Kernel(tiles, at_once, threads=512) as (n, d):
            at = T.alloc_var("int32", init=d)
            while T.And(at < parted, Divided[T.min(at, parted - 1), 2] > 0):
                merge_pieces(f, Means, Sums, O, LSE, n * few_rows(f), [T.bind(Divided[at, j]) for j in (0, 1, 2)])
                at = at + at_once

    return planned_decode


def decode_attention(f: DecodeForm) -> Any:
    """The kernel with the parameters (Q, K, V, Table, Lengths, scale, unit, Means, Sums, O, LSE).

    Q (batch, seq_q, heads, dim); K (pages, page_size, kv_heads, dim) and V (…, dim_v) with Table (batch, width), or without a
    table K (batch, width, kv_heads, dim); Lengths (batch,): keys of each sequence; unit: what an element of V counts, where
    caches have another type than Q (`scale` holds that of K); O (batch, seq_q, heads, dim_v); LSE (batch, heads, seq_q)
    float32, written when f.with_lse. Means (splits, batch, seq_q, heads, dim_v) and Sums (splits, batch, heads, seq_q),
    float32, are workspace, used when f.split. Arguments that are not used are None.

    Query i of a sequence stands at key position Lengths - seq_q + i. It sees the keys up to its position, at most `f.left`
    before.
    """
    if f.planned:
        return planned_attention(f)
    (batch, seq_q, heads, kv_heads, _, dim_v, *_), (rows, keys), left = f.sizes, (f.tile.rows, f.tile.keys), f.left
    blocks, splits = -(-f.used // rows), T.dynamic("splits") if f.split else 1
    queries, result, logs, k_cache, v_cache, table = types_of(f)

    @T.prim_func
    def flash_decode(Q: queries, K: k_cache, V: v_cache, Table: table, Lengths: T.Tensor((batch,), "int32"), scale: T.float32,
                     unit: T.float32, Means: T.Tensor((splits, batch, seq_q, heads, dim_v) if f.split else (1,), "float32"),
                     Sums: T.Tensor((splits, batch, heads, seq_q) if f.split else (1,), "float32"), O: result, LSE: logs):
        with T.Kernel(splits, kv_heads * blocks, batch, threads=f.tile.threads) as (s, hb, b):
            if f.narrow:
                T.annotate_min_blocks_per_sm(narrow_blocks(f.sizes, f.tile, f.latent, f.wide))
            work = None if f.narrow else working_set(f)
            c = scale * LOG2E
            h = hb // blocks
            row = hb % blocks * rows  # row r is query r // group of head h * group + r % group
            length = Lengths[b]
            at = length - seq_q
            begin = 0 if left is None else T.max(0, at - left) // keys
            end = T.max(begin, T.ceildiv(length, keys))
            share = T.ceildiv(end - begin, splits)
            first = T.min(end, begin + s * share)
            last = T.min(end, first + share)
            results, place = ((Means, Sums), (s, b)) if f.split else ((O, LSE), (b,))
            attended(f, Q, (K, V, Table), work, (c, unit), (b, h, row), at, (first, last),
                     lambda acc, total, g: store(f, acc, total, results, place, h, row + g, f.split or f.with_lse))
        if f.split:
            with T.Kernel(T.ceildiv(heads * seq_q, merged_rows(f)), batch, threads=128) as (n, b):
                merge_splits(f, Means, Sums, O, LSE, splits, n * merged_rows(f), b)

    return flash_decode
