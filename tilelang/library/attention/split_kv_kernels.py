"""The program behind `flash_attention` with a mask where tiles of queries are too few for the processors.

The tiles of keys that a tile of queries sees are shared out to as many blocks as there are room for, each a part as long as
the others.  A part leaves its weighted mean and the logarithm of its sum, and a second launch weighs the parts against each
other.  All blocks run at once, so that the longest tile's parts are the time of a call.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from .kernels import LOG2E, Mask, Sizes, Tile, absorb, finish, key_tiles, reset, seen, working_set
from .work_partition import JOINED, Shares, join


def parted_attention(sizes: Sizes, strides: Any, layout: str, dtype: str, mask: Mask, tile: Tile, deal: Shares, with_lse: bool,
                     fixed: float | None = None) -> Any:
    """As dense_attention, for sizes that are ints.  Means (deal.parts, tile.rows, dim_v), Sums (deal.parts, tile.rows),
    float32: room for parts.  deal: of no whole tiles, `steps` parts a tile and one part a block.
    """
    batch, seq_q, seq_k, heads, kv_heads, dim, dim_v = sizes
    rows, keys, group, parts = tile.rows, tile.keys, heads // kv_heads, deal.steps
    tiles = -(-seq_q // rows)  # of a head

    def shape(length, n_heads, width):
        return (batch, length, n_heads, width) if layout == "bshd" else (batch, n_heads, length, width)

    def part(X, r, h, start, length):
        b = r // (tiles * heads)
        return X[b, start:start + length, h, :] if layout == "bshd" else X[b, h, start:start + length, :]

    @T.prim_func
    def flash_attention(Q: T.StridedTensor(shape(seq_q, heads, dim), strides[0], dtype),
                        K: T.StridedTensor(shape(seq_k, kv_heads, dim), strides[1], dtype),
                        V: T.StridedTensor(shape(seq_k, kv_heads, dim_v), strides[2], dtype),
                        scale: T.float32,
                        Means: T.Tensor((deal.parts, rows, dim_v), "float32"),
                        Sums: T.Tensor((deal.parts, rows), "float32"),
                        O: T.StridedTensor(shape(seq_q, heads, dim_v), strides[3], dtype),
                        LSE: T.Tensor((batch, heads, seq_q) if with_lse else (1,), "float32")):
        with T.Kernel(deal.parts, threads=tile.threads) as n:
            Qs, Ks, Vs, S, P, acc, top, before, factor, total, more = working_set(tile, dim, dim_v, dtype)
            c = (scale if fixed is None else fixed) * LOG2E
            r = n // parts
            row = r % tiles * rows
            h = r // tiles % heads
            at = row + seq_k - seq_q  # position of the tile's first query among the keys
            first, last = key_tiles(mask, at, rows, seq_k, keys)
            begin = first + n % parts * (last - first) // parts
            end = first + (n % parts + 1) * (last - first) // parts
            T.copy(part(Q, r, h, row, rows), Qs)
            reset(acc, top, total, c)
            for k in T.Pipelined(begin, end, num_stages=tile.stages):
                T.copy(part(K, r, h // group, k * keys, keys), Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    S[i, j] = T.if_then_else(seen(mask, k * keys + j, seq_k, at + i), S[i, j], -T.infinity("float32"))
                T.copy(part(V, r, h // group, k * keys, keys), Vs)
                absorb(S, P, acc, top, before, factor, total, more, c)
                T.gemm(P, Vs, acc)
            finish(acc, top, total, factor, c)
            T.copy(acc, Means[n, :, :])
            T.copy(total, Sums[n, :])
        with T.Kernel(rows // JOINED, deal.rest, threads=128) as (y, r):
            mean = T.alloc_fragment((JOINED, dim_v), "float32")
            total = T.alloc_fragment((JOINED,), "float32")
            join(Means, Sums, mean, total, r, y * JOINED, deal)
            row = r % tiles * rows + y * JOINED
            h = r // tiles % heads
            T.copy(mean, part(O, r, h, row, JOINED))
            if with_lse:
                T.copy(total, LSE[r // (tiles * heads), h, row:row + JOINED])

    return flash_attention


__all__ = ["parted_attention"]
