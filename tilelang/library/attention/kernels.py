"""The program behind `flash_attention`: one pass over the keys for a tile of queries; and what it has in common with others.

A tile of scores S = Q K^T never leaves the registers.  Per row, `top` is the largest score so far, or lags behind it by
LAG / c at most, `total` the sum of 2^(c s - c top) and `acc` the sum of these weights times V; c = scale log2(e), so that a
weight is one multiply-add and one exp2.  When `top` rises, both sums are multiplied by 2^(c old - c new).

Keys a row does not see have the score -inf, and the weight 2^-inf = 0: `top` starts at the lowest power of two whose product
with c is finite, which no score that counts lies below.  A row that sees nothing at all ends with 0 and the logarithm
-inf.  NaN goes through: no comparison hides one.

Without a mask tiles of keys come from the last one on: a ragged end cuts it, and it is taken before the loop, whose steps
need no mask then.  Under a causal mask that order was slower.

Compilers contract a * c - b * c, whose second product alone is rounded then.  So where `top` stays the sums are multiplied by
2^((old - new) c), which is 1 whatever c and `top` are, and the product of c and what `top` starts from is exact.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import tilelang.language as T

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LAG = 8.0  # `top` follows the scores when weights would pass 2^8: far below what a float16 holds


@dataclass(frozen=True)
class Mask:
    """Which keys a query at key position p sees: p - left .. p + right; None: no limit on that side."""

    left: int | None = None
    right: int | None = None


class Sizes(NamedTuple):
    """Of one call; ints or symbols, heads and dims ints."""

    batch: Any
    seq_q: Any
    seq_k: Any
    heads: int
    kv_heads: int
    dim: int
    dim_v: int


@dataclass(frozen=True)
class Tile:
    """Rows of queries and of keys a block works on, stages of K and V, and threads."""

    rows: int = 64
    keys: int = 64
    stages: int = 2
    threads: int = 128


def lowest(c: Any) -> Any:
    """What `top` starts from: -2^127 over the power of two in c, or over 1 where c is less than that.  c: a float, or an
    expression in float32."""
    if isinstance(c, (int, float)):
        return -2.0**(128 - math.frexp(np.float32(max(c, 1.0)))[1])
    exponent = T.shift_right(T.reinterpret(T.max(c, 1.0), "int32"), 23) - 127
    return -T.reinterpret(T.shift_left(254 - exponent, 23), "float32")


def working_set(tile: Tile, dim: int, dim_v: int, dtype: str) -> tuple[Any, ...]:
    """What a block works in: Qs (rows, dim), Ks (keys, dim), Vs (keys, dim_v) in shared memory; in registers S (rows, keys) and
    acc (rows, dim_v) in float32, P like S in dtype; and a float32 a row each: `top`, `before`, `factor`, `total` and the sum
    of a tile of keys."""
    rows, keys = tile.rows, tile.keys
    return (T.alloc_shared((rows, dim), dtype), T.alloc_shared((keys, dim), dtype), T.alloc_shared((keys, dim_v), dtype),
            T.alloc_fragment((rows, keys), "float32"), T.alloc_fragment((rows, keys), dtype),
            T.alloc_fragment((rows, dim_v), "float32"), *[T.alloc_fragment((rows,), "float32") for _ in range(5)])


@T.macro
def reset(acc, top, total, c):
    """No key seen yet."""
    T.clear(acc)
    T.clear(total)
    T.fill(top, lowest(c))


@T.macro
def absorb(S, P, acc, top, before, factor, total, part, c):
    """Take the weights of a tile of scores S: into P (16 bit), `total` and, as a factor per row, into `acc`."""
    rows, keys = S.shape
    T.copy(top, before)
    T.reduce_max(S, top, dim=1)
    for i in T.Parallel(rows):
        top[i] = T.if_then_else((top[i] - before[i]) * c > LAG, top[i], before[i])
    for i in T.Parallel(rows):
        factor[i] = T.exp2((before[i] - top[i]) * c)
    for i, j in T.Parallel(rows, keys):
        S[i, j] = T.exp2(S[i, j] * c - top[i] * c)
    T.reduce_sum(S, part, dim=1)
    for i in T.Parallel(rows):
        total[i] = total[i] * factor[i] + part[i]
    for i, j in T.Parallel(rows, acc.shape[1]):
        acc[i, j] *= factor[i]
    T.copy(S, P)


@T.macro
def finish(acc, top, total, factor, c):
    """Results of a tile: acc becomes the weighted mean of V, `total` the natural logarithm of the sum of exp(scores)."""
    rows, dim = acc.shape
    for i in T.Parallel(rows):
        factor[i] = T.if_then_else(total[i] == 0, 0.0, T.fast_rcp(total[i]))  # a sum of a row is 1 or more
    for i, j in T.Parallel(rows, dim):
        acc[i, j] *= factor[i]
    for i in T.Parallel(rows):
        total[i] = T.if_then_else(total[i] == 0, -T.infinity("float32"), (T.log2(total[i]) + top[i] * c) * LN2)


def dense_attention(sizes: Sizes, strides: Any, layout: str, dtype: str, mask: Mask, tile: Tile, with_lse: bool,
                    fixed: float | None = None) -> Any:
    """Q (batch, seq_q, heads, dim), K (batch, seq_k, kv_heads, dim), V (…, dim_v), O (batch, seq_q, heads, dim_v) where
    layout is "bshd", with heads before sequences where it is "bhsd"; strides: four tuples, in elements, the last one 1.
    LSE (batch, heads, seq_q) float32, or None without with_lse.  fixed: the scale of every call, None to read it in each.

    Query i stands at key position i + seq_k - seq_q.  sizes and strides: ints, or symbols for what is known at calls.
    """
    batch, seq_q, seq_k, heads, kv_heads, dim, dim_v = sizes
    rows, keys, group, back = tile.rows, tile.keys, heads // kv_heads, mask == Mask()

    def shape(length, n_heads, width):
        return (batch, length, n_heads, width) if layout == "bshd" else (batch, n_heads, length, width)

    def part(X, b, h, start, length):
        return X[b, start:start + length, h, :] if layout == "bshd" else X[b, h, start:start + length, :]

    @T.prim_func
    def flash_attention(Q: T.StridedTensor(shape(seq_q, heads, dim), strides[0], dtype),
                        K: T.StridedTensor(shape(seq_k, kv_heads, dim), strides[1], dtype),
                        V: T.StridedTensor(shape(seq_k, kv_heads, dim_v), strides[2], dtype),
                        scale: T.float32,
                        O: T.StridedTensor(shape(seq_q, heads, dim_v), strides[3], dtype),
                        LSE: T.Tensor((batch, heads, seq_q) if with_lse else (1,), "float32")):
        with T.Kernel(T.ceildiv(seq_q, rows), heads, batch, threads=tile.threads) as (bx, h, b):
            Qs, Ks, Vs, S, P, acc, top, before, factor, total, more = working_set(tile, dim, dim_v, dtype)
            c = (scale if fixed is None else fixed) * LOG2E
            row = bx * rows
            at = row + seq_k - seq_q  # position of the tile's first query among the keys
            first, last = key_tiles(mask, at, rows, seq_k, keys)
            T.copy(part(Q, b, h, row, rows), Qs)
            reset(acc, top, total, c)
            for k in T.Pipelined(0 if back else first, last - first if back else last, num_stages=tile.stages):
                key = (last - 1 - k) * keys if back else k * keys
                T.copy(part(K, b, h // group, key, keys), Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    S[i, j] = T.if_then_else(seen(mask, key + j, seq_k, at + i), S[i, j], -T.infinity("float32"))
                T.copy(part(V, b, h // group, key, keys), Vs)
                absorb(S, P, acc, top, before, factor, total, more, c)
                T.gemm(P, Vs, acc)
            finish(acc, top, total, factor, c)
            T.copy(acc, part(O, b, h, row, rows))
            if with_lse:
                T.copy(total, LSE[b, h, row:row + rows])

    return flash_attention


def key_tiles(mask: Mask, at: Any, rows: int, seq_k: Any, keys: int) -> tuple[Any, Any]:
    """The first and the last (exclusive) tile of keys that some of `rows` queries from position `at` on see."""
    end = seq_k if mask.right is None else T.max(0, T.min(seq_k, at + rows + mask.right))
    first = 0 if mask.left is None else T.max(0, at - mask.left) // keys
    last = T.ceildiv(end, keys)
    return first, last if mask.left is None else T.max(first, last)


def seen(mask: Mask, key: Any, seq_k: Any, position: Any) -> Any:
    """Whether a query at `position`, among the keys, sees `key`.

    A query that sees nothing to its right sees no key beyond the last one: that condition would be a second one to test for
    every tile of keys.  (Rows of a tile beyond the last query see them, and are not stored.)
    """
    ends = [] if mask.right is not None and mask.right <= 0 else [key < seq_k]
    if mask.right is not None:
        ends.append(key <= position + mask.right)
    if mask.left is not None:
        ends.append(key >= position - mask.left)
    return functools.reduce(T.And, ends)


__all__ = ["Mask", "Sizes", "Tile", "absorb", "dense_attention", "finish", "key_tiles", "lowest", "reset", "seen",
           "working_set"]
