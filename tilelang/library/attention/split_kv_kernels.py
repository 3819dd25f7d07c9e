"""Kernels of flash_attention in which blocks divide the keys of a tile (split-KV), used where tiles alone fill no whole waves.

A split of a tile of queries stores its weighted mean and the logarithm of its sum in a workspace; a second launch merges the
splits. There are two work partitions:

- with a mask and few tiles, each tile is divided into the same number of equal splits, and all blocks run at once, so that the
  longest tile's splits decide the time of a call;
- without a mask, tiles have equal length: whole waves compute one tile per block. The tiles of keys that the remaining tiles of
  queries see are laid end to end, and each block takes an equal number of them: a range in one tile of queries, or in two
  neighbours (stream-K).
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from .form import LOG2E, AttentionForm
from .kernels import KeyTiles, attend, copying, itself, key_tiles, seen, working_set
from .problem import Mask

MERGED = 4  # rows that a block of the second launch merges


@T.macro
def merge(Means, Sums, mean, total, r, y, partition):
    """Compute `mean` and `total`, the result and logarithm of a few rows of the r-th divided tile, from row y on.

    They are merged from the means and logarithms of the tile's splits. -inf: no visible key.
    """
    rows, dim_v = mean.shape
    largest, weight = [T.alloc_fragment((rows,), "float32") for _ in (0, 1)]
    steps, per_block = partition.steps, partition.per_block
    first = r * steps // per_block
    last = T.ceildiv((r + 1) * steps, per_block)
    T.fill(largest, -T.infinity("float32"))
    T.clear(total)
    T.clear(mean)
    for j in T.serial(first, last):
        for i in T.Parallel(rows):
            largest[i] = T.max(largest[i], Sums[partition.place(r, j), y + i])
    for i in T.Parallel(rows):
        largest[i] = T.if_then_else(largest[i] == -T.infinity("float32"), 0.0, largest[i])
    for j in T.serial(first, last):
        at = partition.place(r, j)
        for i in T.Parallel(rows):
            weight[i] = T.exp2((Sums[at, y + i] - largest[i]) * LOG2E)
        for i in T.Parallel(rows):
            total[i] += weight[i]
        for i, d in T.Parallel(rows, dim_v):
            mean[i, d] += weight[i] * Means[at, y + i, d]
    for i, d in T.Parallel(rows, dim_v):
        mean[i, d] = T.if_then_else(total[i] == 0, 0.0, mean[i, d] / total[i])
    for i in T.Parallel(rows):
        total[i] = T.if_then_else(total[i] == 0, -T.infinity("float32"), largest[i] + T.log2(total[i]) / LOG2E)


@T.macro
def merge_tiles(f, tiles, Means, Sums, O, LSE):
    """The second launch, which merges the splits of all divided tiles. tiles: number of tiles of queries of a head."""
    heads, whole, rest = f.sizes.heads, f.partition.whole, f.partition.rest
    with T.Kernel(f.tile.rows // MERGED, rest, threads=128) as (y, r):
        mean = T.alloc_fragment((MERGED, f.sizes.dim_v), "float32")
        total = T.alloc_fragment((MERGED,), "float32")
        merge(Means, Sums, mean, total, r, y * MERGED, f.partition)
        row = (whole + r) % tiles * f.tile.rows + y * MERGED
        h = (whole + r) // tiles % heads
        T.copy(mean, f.rows(O, (whole + r) // (tiles * heads), h, row, MERGED))
        if f.with_lse:
            T.copy(total, LSE[(whole + r) // (tiles * heads), h, row:row + MERGED])


def split_kv_attention(f: AttentionForm) -> Any:
    """The kernel in which blocks divide the keys of tiles, as f.partition says: with a mask in equal splits, else evenly.

    Its parameters are (Q, K, V, scale, Means, Sums, O, LSE), as for dense_attention. Means (splits, rows, dim_v) and Sums
    (splits, rows), float32, are workspace. Sizes that are no ints are divided in equal splits too.
    """
    seq_q, seq_k, heads = f.sizes[1:4]
    rows, keys, partition = f.tile.rows, f.tile.keys, f.partition
    whole, rest, steps, per_block, sms = partition
    equal = f.mask != Mask() or not isinstance(rest, int)
    per_head = T.ceildiv(seq_q, rows)  # tiles

    def equal_tiles(K: Any, V: Any, r: Any, h: Any, at: Any, begin: Any, end: Any) -> KeyTiles:
        b = r // (per_head * heads)
        return KeyTiles(begin, end, itself, lambda k: f.rows(K, b, h // f.group, k * keys, keys),
                        lambda k: f.rows(V, b, h // f.group, k * keys, keys),
                        lambda k, _, i, j: seen(f.mask, k * keys + j, seq_k, at + i))

    def even_tiles(K: Any, V: Any, at: Any, h: Any, first: Any, count: Any) -> KeyTiles:
        b = at // (per_head * heads)
        return KeyTiles(0, count, lambda k: (first + count - 1 - k) * keys, lambda key: f.rows(K, b, h // f.group, key, keys),
                        lambda key: f.rows(V, b, h // f.group, key, keys),
                        lambda k, key, i, j: T.Or(k > 0, T.Or(first + count < steps, j < seq_k - (steps - 1) * keys)))

    @T.prim_func
    def flash_attention(Q: f.q, K: f.k, V: f.v, scale: T.float32,
                        Means: T.Tensor((partition.splits, rows, f.sizes.dim_v), "float32"),
                        Sums: T.Tensor((partition.splits, rows), "float32"), O: f.o, LSE: f.lse):
        with T.Kernel(whole + partition.splits, threads=f.tile.threads) as n:
            work = working_set(f)
            c = f.exponent_scale(scale)
            if equal:
                r = n // steps
                row = r % per_head * rows
                h = r // per_head % heads
                at = row + seq_k - seq_q  # key position of the tile's first query
                first, last = key_tiles(f.mask, at, rows, seq_k, keys)
                begin = first + n % steps * (last - first) // steps
                end = first + (n % steps + 1) * (last - first) // steps
                queries = copying(f.rows(Q, r // (per_head * heads), h, row, rows))
                acc, total = attend(f, work, queries, c, equal_tiles(K, V, r, h, at, begin, end))
                T.copy(acc, Means[n, :, :])
                T.copy(total, Sums[n, :])
            else:
                begin = (n - whole) % sms * per_block  # start of a block's range
                r = begin // steps + (n - whole) // sms
                first = T.if_then_else(n < whole, 0, T.max(0, begin - r * steps))
                # A split without a tile still runs one step: a loop that may be empty would need a second way to load queries.
                own = T.max(1, T.min(steps, T.min(begin + per_block, rest * steps) - r * steps) - first)
                count = T.if_then_else(n < whole, steps, own)
                at = T.if_then_else(n < whole, n, whole + T.min(r, rest - 1))
                row = at % per_head * rows
                h = at // per_head % heads
                acc, total = attend(f, work, copying(f.rows(Q, at // (per_head * heads), h, row, rows)), c,
                                    even_tiles(K, V, at, h, first, count))
                if n < whole:
                    T.copy(acc, f.rows(O, at // (per_head * heads), h, row, rows))
                    if f.with_lse:
                        T.copy(total, LSE[at // (per_head * heads), h, row:row + rows])
                else:
                    for i, j in T.Parallel(rows, f.sizes.dim_v):  # by threads: a second TMA store would need more shared memory
                        Means[n - whole, i, j] = acc[i, j]
                    for i in T.Parallel(rows):
                        Sums[n - whole, i] = total[i]
        merge_tiles(f, per_head, Means, Sums, O, LSE)

    return flash_attention
