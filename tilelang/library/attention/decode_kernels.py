"""The kernel of flash_decode: few queries per sequence attend to many cached keys, which several blocks divide (split-KV).

The queries of all heads that read one kv head are the rows of one tile, so K and V are read once for all of them; reading them
takes most of the time of a decode step. `splits` blocks divide the keys of a sequence. Each stores its weighted mean and the
logarithm of its sum, and a second launch merges them. With one split the first launch writes the result itself.

Keys lie in pages that a table names, in any order; a tile of keys lies in one page, or has several. See kernels.py for the
running maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tilelang.target.machine import REGISTERS_PER_SM

from .decode_problem import DecodeSizes
from .form import LOG2E, DecodeForm, Tile
from .kernels import LAG, KeyTiles, attend, fetch, ln2, reset, working_set


@T.macro
def merge_splits(f, Means, Sums, O, LSE, splits, at):
    """Compute O[b, i, h, :] from the means of all splits, weighted by their sums. Sums holds the logarithms; -inf: no key seen.
    """
    h, i, b = at
    mean = T.alloc_fragment((f.sizes.dim_v,), "float32")
    largest = T.alloc_var("float32", init=-T.infinity("float32"))
    weights = T.alloc_var("float32", init=0.0)
    for s in T.serial(splits):
        largest = T.max(largest, Sums[s, b, h, i])
    base = T.if_then_else(largest == -T.infinity("float32"), 0.0, largest)
    T.clear(mean)
    for s in T.serial(splits):
        weight = T.exp2((Sums[s, b, h, i] - base) * LOG2E)
        weights = weights + weight
        for j in T.Parallel(f.sizes.dim_v):
            mean[j] += weight * Means[s, b, i, h, j]
    for j in T.Parallel(f.sizes.dim_v):
        O[b, i, h, j] = T.if_then_else(weights == 0, 0.0, mean[j] / weights)
    if f.with_lse and T.get_thread_binding() == 0:
        LSE[b, h, i] = largest + T.log2(weights) / LOG2E


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
    if f.math == f.dtype:
        return 1.0, 1.0
    q, most = T.alloc_fragment((f.tile.rows, f.sizes.dim), "float32"), T.alloc_fragment((f.tile.rows,), "float32")
    largest = T.alloc_fragment((1,), "float32")
    for i, j in T.Parallel(f.tile.rows, f.sizes.dim):
        r = T.min(row + i, f.used - 1)
        q[i, j] = T.abs(T.cast(Q[b, r // f.group, h * f.group + r % f.group, j], "float32"))
    T.reduce_max(q, most, dim=1)
    T.reduce_max(most, largest, dim=0)
    bits = T.max(T.min(T.shift_right(T.reinterpret(largest[0], "int32"), 23), 253), 1)
    return T.reinterpret(T.shift_left(bits, 23), "float32"), T.reinterpret(T.shift_left(254 - bits, 23), "float32")


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
    """Half of n or less, a multiple of 16 that divides it; n where it has no half, while at most `most`."""
    return n // next(p for p in (2, 1, *range(3, n)) if n % (16 * p) == 0 and n // p <= most or p == n // 16)


def narrow_blocks(sizes: DecodeSizes, tile: Tile, latent: bool = False) -> int:
    """Blocks of narrow caches for which an SM of sm_90 has room: they hide the latencies of each other."""
    dim, dim_v, rows, keys = *sizes[4:6], tile.rows, tile.keys
    registers = (dim_v + keys) * rows // tile.threads + rows // 2 + max(40, 24 + dim_v // 16)
    shared = 2 * rows * (dim + keys) + tile.stages * keys * (dim if latent else dim + dim_v) + 1024
    return max(1, min(6, REGISTERS_PER_SM // (tile.threads * registers), (228 << 10) // shared))


def hides_keys(f: DecodeForm, k: Any, row: Any, at: Any) -> Any:
    """Whether a query of the tile from `row` on does not see all keys of tile k. at: the first query's position."""
    keys = f.tile.keys
    ends = (k + 1) * keys > at + row // f.group + 1
    return ends if f.left is None else T.Or(ends, k * keys < at + (row + f.tile.rows - 1) // f.group - f.left)


@T.macro
def add_scores(f, Ks, Qs, begin, S):
    """S += Ks Qs^T for the columns of Q from `begin` on, with pieces of Ks as operands in registers."""
    keys, dim = Ks.shape
    d = piece(dim, max(64, 16384 // f.sizes.dim_v))
    K = T.alloc_fragment((keys, d), f.math)
    for n in T.unroll(dim // d):
        for i, j in T.Parallel(keys, d):
            K[i, j] = T.cast(Ks[i, n * d + column_at(j)], f.math)
        T.gemm(K, Qs[:, begin + n * d:begin + (n + 1) * d], S, transpose_B=True)


@T.macro
def attend_narrow(f, load, c, unit, tiles, hides):
    """`attend` for caches of float8, whose elements of V count `unit`: (weighted means, logarithms of sums), rows in columns.

    S^T = K Q^T and acc^T = V^T P^T: keys and dimensions are the rows, so the converted tiles of K and V are first operands,
    which may lie in registers. Where they passed through shared memory, a block waited for its threads four times a tile.
    """
    (rows, keys), dim, dim_v = (f.tile.rows, f.tile.keys), f.sizes.dim, f.sizes.dim_v
    Qs, P = T.alloc_shared((rows, dim), f.math), T.alloc_shared((keys, rows), f.math)
    Ks = T.alloc_shared((keys, dim - dim_v if f.latent else dim), f.kv_dtype)
    Vs = T.alloc_shared((keys, dim_v), f.kv_dtype)
    few, height = piece(keys, max(16, 8192 // dim_v)), -(-dim_v // 64) * 64  # of operands of V, which take few registers
    V = T.alloc_fragment((few, height), f.math)
    S, acc = T.alloc_fragment((keys, rows), f.accum), T.alloc_fragment((height, rows), f.accum)
    top, before, factor, total, more = [T.alloc_fragment((rows,), f.accum) for _ in (0, 1, 2, 3, 4)]
    over, each, most = [T.alloc_fragment(x, f.accum) for x in ((keys, rows), (keys,), (1,))]
    limit = LAG / c
    load(Qs)
    reset(acc, top, total, c)
    for k in T.Pipelined(tiles.begin, tiles.end, num_stages=f.tile.stages):
        key = tiles.place(k)
        fetch(tiles.keys(key), Ks)
        fetch(tiles.values(key), Vs)
        T.clear(S)
        if f.latent:
            add_scores(f, Vs, Qs, 0, S)
        add_scores(f, Ks, Qs, dim_v if f.latent else 0, S)
        if hides(k):
            for j, i in T.Parallel(keys, rows):
                S[j, i] = T.if_then_else(tiles.visible(k, key, i, j), S[j, i], -T.infinity(f.accum))
        for j, i in T.Parallel(keys, rows):
            over[j, i] = S[j, i] - top[i]
        T.reduce_max(over, each, dim=1)
        T.reduce_max(each, most, dim=0)
        if most[0] > limit:
            T.copy(top, before)
            T.reduce_max(S, top, dim=0)
            for i in T.Parallel(rows):
                top[i] = T.if_then_else((top[i] - before[i]) * c > LAG, top[i], before[i])
            for i in T.Parallel(rows):
                factor[i] = T.exp2((before[i] - top[i]) * c)
            for i in T.Parallel(rows):
                total[i] *= factor[i]
            for j, i in T.Parallel(height, rows):
                acc[j, i] *= factor[i]
        for j, i in T.Parallel(keys, rows):
            S[j, i] = T.exp2(S[j, i] * c - top[i] * c)
        T.reduce_sum(S, more, dim=0)
        for i in T.Parallel(rows):
            total[i] = total[i] + more[i]
        T.copy(S, P)
        for n in T.unroll(keys // few):
            for i, j in T.Parallel(few, height):
                V[i, j] = T.cast(Vs[n * few + i, row_at(j, dim_v)], f.math)
            T.gemm(V, P[n * few:(n + 1) * few, :], acc, transpose_A=True)
    for i in T.Parallel(rows):
        factor[i] = T.if_then_else(total[i] == 0, 0.0, unit * T.fast_rcp(total[i]))
    for j, i in T.Parallel(height, rows):
        acc[j, i] *= factor[i]
    for i in T.Parallel(rows):
        total[i] = T.if_then_else(total[i] == 0, -T.infinity(f.accum), (T.log2(total[i]) + top[i] * c) * ln2(total))
    return acc, total


@T.macro
def store(f, acc, total, results, at, h, row, with_log):
    """Store the rows of a tile that are queries: acc to mean[*at, query, head, :], total to log[*at, head, query].

    results: (mean, log). Row r of the tile that starts at `row` is query r // group of head h * group + r % group; where caches
    are narrow, rows are the columns of acc.
    """
    mean, log = results
    for i, j in T.Parallel(*acc.shape):
        r, d = (row + j, row_at(i, f.sizes.dim_v)) if f.narrow else (row + i, j)
        if r < f.used if not f.narrow else T.And(r < f.used, i < f.sizes.dim_v):
            mean[(*at, r // f.group, h * f.group + r % f.group, d)] = acc[i, j]
    if with_log:
        for i in T.Parallel(*total.shape):
            r = row + i
            if r < f.used:
                log[(*at, h * f.group + r % f.group, r // f.group)] = total[i]


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
    batch, seq_q, heads, kv_heads, dim, dim_v, pages, page_size, width = f.sizes
    rows, keys, left = f.tile.rows, f.tile.keys, f.left
    blocks = -(-f.used // rows)
    splits = T.dynamic("splits") if f.split else 1
    cache = (pages, width if page_size is None else page_size, kv_heads)

    def key_range(K: Any, V: Any, Table: Any, place: tuple[Any, Any, Any], at: Any, span: Any) -> KeyTiles:
        b, h, row = place
        latent = slice(dim_v, dim), slice(0, dim_v)
        tiles = [(K, n) for n in latent] if f.latent else [(K, slice(None)), (V, slice(None))]
        keys_of, values_of = (lambda at, x=x: f.rows(x[0], b, h, at, x[1]) for x in tiles)
        return KeyTiles(*span, lambda k: f.place(Table, b, k, at + seq_q), keys_of, values_of,
                        lambda k, _, i, j: visible(f, k * keys + j, at + (row + i) // f.group))

    def queries(Q: Any, b: Any, h: Any, row: Any, factor: Any) -> Callable[[Any], Any]:
        return lambda tile: load_queries(f, tile, Q, b, h, row, factor)

    @T.prim_func
    def flash_decode(Q: T.Tensor((batch, seq_q, heads, dim), f.dtype),
                     K: T.StridedTensor((*cache, dim), f.strides[0], f.kv_dtype),
                     V: T.Tensor((1,), f.kv_dtype) if f.latent else T.StridedTensor((*cache, dim_v), f.strides[1], f.kv_dtype),
                     Table: T.Tensor((1, 1) if page_size is None else (batch, width), "int32"),
                     Lengths: T.Tensor((batch,), "int32"), scale: T.float32, unit: T.float32,
                     Means: T.Tensor((splits, batch, seq_q, heads, dim_v) if f.split else (1,), "float32"),
                     Sums: T.Tensor((splits, batch, heads, seq_q) if f.split else (1,), "float32"),
                     O: T.Tensor((batch, seq_q, heads, dim_v), f.dtype),
                     LSE: T.Tensor((batch, heads, seq_q) if f.with_lse else (1,), "float32")):
        with T.Kernel(splits, kv_heads * blocks, batch, threads=f.tile.threads) as (s, hb, b):
            if f.narrow:
                T.annotate_min_blocks_per_sm(narrow_blocks(f.sizes, f.tile, f.latent))
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
            size, factor = magnitude(f, Q, b, h, row)
            load, tiles = queries(Q, b, h, row, factor), key_range(K, V, Table, (b, h, row), at, (first, last))
            if f.narrow:
                acc, total = attend_narrow(f, load, c * size, unit, tiles, lambda k: hides_keys(f, k, row, at))
            else:
                acc, total = attend(f, work, load, c, tiles)
            if f.split:
                store(f, acc, total, (Means, Sums), (s, b), h, row, True)
            else:
                store(f, acc, total, (O, LSE), (b,), h, row, f.with_lse)
        if f.split:
            with T.Kernel(heads, seq_q, batch, threads=128) as (h, i, b):
                merge_splits(f, Means, Sums, O, LSE, splits, (h, i, b))

    return flash_decode
