"""The program behind `flash_attention` where tiles of queries are all equal and do not fill whole rounds of the processors.

Whole rounds are computed a tile a block.  The tiles of keys that the remaining tiles of queries see stand one behind another,
and each block takes as many of them: its range lies in one tile of queries, or in two that follow each other.  A part of a
tile leaves its weighted mean and the logarithm of its sum, and a second launch weighs the parts against each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from .kernels import LOG2E, Sizes, Tile, absorb, finish, reset, working_set

JOINED = 4  # rows that a block of the second launch weighs


class Shares(NamedTuple):
    """How tiles of queries are dealt out.

    whole: the first tiles, a block each.  rest: the tiles behind them, of `steps` tiles of keys each; every block takes `share`
    of these.  units: blocks that run at the same time.
    """

    whole: int
    rest: int
    steps: int
    share: int
    units: int

    @property
    def cross(self) -> bool:
        """Whether some blocks have parts of two tiles."""
        return self.rest > 1 and self.steps % self.share != 0

    @property
    def parts(self) -> int:
        """Parts that room is made for: the blocks' first ones, then their second ones; some are of no tile."""
        taking = -(-self.rest * self.steps // self.share)
        return self.units + taking if self.cross else taking

    def place(self, r: Any, j: Any) -> Any:
        """Where in that room block j's part of the r-th shared tile is."""
        return T.if_then_else(j * self.share // self.steps == r, j, j + self.units) if self.cross else j


@T.macro
def join(Means, Sums, mean, total, r, y, deal):
    """mean, total: result and logarithm of a few rows of the r-th shared tile, from row y on, of the means and logarithms of
    its parts.  -inf: no key counted."""
    rows, dim_v = mean.shape
    largest, weight = [T.alloc_fragment((rows,), "float32") for _ in (0, 1)]
    steps, share = deal.steps, deal.share
    first = r * steps // share
    last = T.ceildiv((r + 1) * steps, share)
    T.fill(largest, -T.infinity("float32"))
    T.clear(total)
    T.clear(mean)
    for j in T.serial(first, last):
        for i in T.Parallel(rows):
            largest[i] = T.max(largest[i], Sums[deal.place(r, j), y + i])
    for i in T.Parallel(rows):
        largest[i] = T.if_then_else(largest[i] == -T.infinity("float32"), 0.0, largest[i])
    for j in T.serial(first, last):
        at = deal.place(r, j)
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


def shared_attention(sizes: Sizes, strides: Any, layout: str, dtype: str, tile: Tile, deal: Shares, with_lse: bool,
                     fixed: float | None = None) -> Any:
    """As dense_attention without a mask, for sizes that are ints.  Means (deal.parts, tile.rows, dim_v), Sums (deal.parts,
    tile.rows), float32: room for parts.
    """
    batch, seq_q, seq_k, heads, kv_heads, dim, dim_v = sizes
    rows, keys, group = tile.rows, tile.keys, heads // kv_heads
    whole, rest, steps, share, units = deal
    tiles = -(-seq_q // rows)  # of a head

    def shape(length, n_heads, width):
        return (batch, length, n_heads, width) if layout == "bshd" else (batch, n_heads, length, width)

    def part(X, at, h, start, length):
        b = at // (tiles * heads)
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
        with T.Kernel(whole + deal.parts, threads=tile.threads) as n:
            Qs, Ks, Vs, S, P, acc, top, before, factor, total, more = working_set(tile, dim, dim_v, dtype)
            c = (scale if fixed is None else fixed) * LOG2E
            begin = (n - whole) % units * share  # of a block's range
            r = begin // steps + (n - whole) // units
            first = T.if_then_else(n < whole, 0, T.max(0, begin - r * steps))
            # A part of no tile takes a step all the same: a loop that may be empty needs a second way to load queries.
            own = T.max(1, T.min(steps, T.min(begin + share, rest * steps) - r * steps) - first)
            count = T.if_then_else(n < whole, steps, own)
            at = T.if_then_else(n < whole, n, whole + T.min(r, rest - 1))
            row = at % tiles * rows
            h = at // tiles % heads
            T.copy(part(Q, at, h, row, rows), Qs)
            reset(acc, top, total, c)
            for k in T.Pipelined(count, num_stages=tile.stages):
                key = (first + count - 1 - k) * keys
                T.copy(part(K, at, h // group, key, keys), Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    S[i, j] = T.if_then_else(T.Or(k > 0, T.Or(first + count < steps, j < seq_k - (steps - 1) * keys)),
                                             S[i, j], -T.infinity("float32"))
                T.copy(part(V, at, h // group, key, keys), Vs)
                absorb(S, P, acc, top, before, factor, total, more, c)
                T.gemm(P, Vs, acc)
            finish(acc, top, total, factor, c)
            if n < whole:
                T.copy(acc, part(O, at, h, row, rows))
                if with_lse:
                    T.copy(total, LSE[at // (tiles * heads), h, row:row + rows])
            else:
                for i, j in T.Parallel(rows, dim_v):  # by threads: room for a second way of TMA would be taken from the first
                    Means[n - whole, i, j] = acc[i, j]
                for i in T.Parallel(rows):
                    Sums[n - whole, i] = total[i]
        with T.Kernel(rows // JOINED, rest, threads=128) as (y, r):
            mean = T.alloc_fragment((JOINED, dim_v), "float32")
            total = T.alloc_fragment((JOINED,), "float32")
            join(Means, Sums, mean, total, r, y * JOINED, deal)
            row = (whole + r) % tiles * rows + y * JOINED
            h = (whole + r) // tiles % heads
            T.copy(mean, part(O, whole + r, h, row, JOINED))
            if with_lse:
                T.copy(total, LSE[(whole + r) // (tiles * heads), h, row:row + JOINED])

    return flash_attention


__all__ = ["JOINED", "Shares", "join", "shared_attention"]
