"""The program behind `flash_decode`: few queries a sequence against many cached keys, shared out over blocks.

The queries of all heads that read one kv head are the rows of one tile: K and V, whose bytes are the time of a decode step,
are read once for all of them.  `splits` blocks share the keys of a sequence; each leaves its weighted mean and the logarithm
of its sum, and a second launch weighs these against each other.  With one split the first launch writes the result itself.

Keys lie in pages that a table names, in any order; a tile of keys lies in one page.  See flash_attention_kernels.py for the
running maximum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from .kernels import LOG2E, Tile, absorb, finish, reset, working_set


class DecodeSizes(NamedTuple):
    """Of one call; ints or symbols, but for heads and dims, seq_q and page_size.

    pages: of the cache; its sequences where there is no table.  page_size: keys of a page, a multiple of the tile's keys;
    None without a table.  width: of the table, pages a sequence may have; without one, keys it may have.
    """

    batch: Any
    seq_q: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    pages: Any
    page_size: int | None
    width: Any


@T.macro
def join(Means, Sums, O, LSE, b, i, h, splits, dim_v, with_lse):
    """O[b, i, h, :] from the means of all splits, weighed by their sums, whose logarithms Sums holds; -inf: no key seen."""
    mean = T.alloc_fragment((dim_v,), "float32")
    largest = T.alloc_var("float32", init=-T.infinity("float32"))
    weights = T.alloc_var("float32", init=0.0)
    for s in T.serial(splits):
        largest = T.max(largest, Sums[s, b, h, i])
    base = T.if_then_else(largest == -T.infinity("float32"), 0.0, largest)
    T.clear(mean)
    for s in T.serial(splits):
        weight = T.exp2((Sums[s, b, h, i] - base) * LOG2E)
        weights = weights + weight
        for j in T.Parallel(dim_v):
            mean[j] += weight * Means[s, b, i, h, j]
    for j in T.Parallel(dim_v):
        O[b, i, h, j] = T.if_then_else(weights == 0, 0.0, mean[j] / weights)
    if with_lse and T.get_thread_binding() == 0:
        LSE[b, h, i] = largest + T.log2(weights) / LOG2E


@T.macro
def take(Qs, Q, b, row, used, group, h):
    """The queries of a tile that starts at `row`, in the order of `give`; zeros behind the last of them (`used`)."""
    rows, dim = Qs.shape
    for i, j in T.Parallel(rows, dim):
        r = row + i
        Qs[i, j] = T.if_then_else(r < used, Q[b, r // group, h * group + r % group, j], T.cast(0, Qs.dtype))


@T.macro
def hide(S, k, at, row, group, left):
    """-inf for the scores of the k-th tile of keys that a row of S does not see; its first query stands at key position `at`.
    left: how many keys before its own a query sees; None: all."""
    rows, keys = S.shape
    for i, j in T.Parallel(rows, keys):
        key = k * keys + j
        position = at + (row + i) // group
        sees = key <= position if left is None else T.And(key <= position, key >= position - left)
        S[i, j] = T.if_then_else(sees, S[i, j], -T.infinity("float32"))


@T.macro
def give(acc, total, mean, log, at, row, used, group, h, with_log):
    """The rows of a tile that are queries (`used`): acc to mean[*at, query, head, :], total to log[*at, head, query].

    Row r of the tile that starts at `row` is query r // group of head h * group + r % group.
    """
    rows, dim_v = acc.shape
    for i, j in T.Parallel(rows, dim_v):
        r = row + i
        if r < used:
            mean[(*at, r // group, h * group + r % group, j)] = acc[i, j]
    if with_log:
        for i in T.Parallel(rows):
            r = row + i
            if r < used:
                log[(*at, h * group + r % group, r // group)] = total[i]


def decode_attention(sizes: DecodeSizes, strides: Any, dtype: str, left: int | None, tile: Tile, split: bool,
                     with_lse: bool) -> Any:
    """Q (batch, seq_q, heads, dim); K (pages, page_size, kv_heads, dim), V (…, dim_v) with Table (batch, width), or without
    K (batch, width, kv_heads, dim); strides: those of K and V, in elements, the last one 1; Lengths (batch,): keys of each
    sequence; O (batch, seq_q, heads, dim_v); LSE (batch, heads, seq_q) float32, written when with_lse.
    Means (splits, batch, seq_q, heads, dim_v) and Sums (splits, batch, heads, seq_q), float32: room, used when split.
    None is passed for what is not used.

    Query i of a sequence stands at key position Lengths - seq_q + i, and sees the keys up to there, less those more than
    `left` before.
    """
    batch, seq_q, heads, kv_heads, dim, dim_v, pages, page_size, width = sizes
    rows, keys, group = tile.rows, tile.keys, heads // kv_heads
    used = seq_q * group  # rows that are queries
    blocks = -(-used // rows)
    splits = T.dynamic("splits") if split else 1
    cache = (pages, width if page_size is None else page_size, kv_heads)

    def part(X, Table, b, key, h):
        if page_size is None:
            return X[b, key:key + keys, h, :]
        return X[Table[b, key // page_size], key % page_size:key % page_size + keys, h, :]

    @T.prim_func
    def flash_decode(Q: T.Tensor((batch, seq_q, heads, dim), dtype),
                     K: T.StridedTensor((*cache, dim), strides[0], dtype),
                     V: T.StridedTensor((*cache, dim_v), strides[1], dtype),
                     Table: T.Tensor((1, 1) if page_size is None else (batch, width), "int32"),
                     Lengths: T.Tensor((batch,), "int32"), scale: T.float32,
                     Means: T.Tensor((splits, batch, seq_q, heads, dim_v) if split else (1,), "float32"),
                     Sums: T.Tensor((splits, batch, heads, seq_q) if split else (1,), "float32"),
                     O: T.Tensor((batch, seq_q, heads, dim_v), dtype),
                     LSE: T.Tensor((batch, heads, seq_q) if with_lse else (1,), "float32")):
        with T.Kernel(splits, kv_heads * blocks, batch, threads=tile.threads) as (s, hb, b):
            Qs, Ks, Vs, S, P, acc, top, before, factor, total, more = working_set(tile, dim, dim_v, dtype)
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
            take(Qs, Q, b, row, used, group, h)
            reset(acc, top, total, c)
            for k in T.Pipelined(first, last, num_stages=tile.stages):
                T.copy(part(K, Table, b, k * keys, h), Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                hide(S, k, at, row, group, left)
                T.copy(part(V, Table, b, k * keys, h), Vs)
                absorb(S, P, acc, top, before, factor, total, more, c)
                T.gemm(P, Vs, acc)
            finish(acc, top, total, factor, c)
            if split:
                give(acc, total, Means, Sums, (s, b), row, used, group, h, True)
            else:
                give(acc, total, O, LSE, (b,), row, used, group, h, with_lse)
        if split:
            with T.Kernel(heads, seq_q, batch, threads=128) as (h, i, b):
                join(Means, Sums, O, LSE, b, i, h, splits, dim_v, with_lse)

    return flash_decode


__all__ = ["DecodeSizes", "decode_attention"]
