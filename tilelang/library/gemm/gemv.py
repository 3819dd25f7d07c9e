"""GEMV with a matrix whose rows are no multiples of 16 bytes: reads the matrix once, in whole words.

A padded copy would read and write the matrix once more. Elements have 2 bytes. Sums are float32, in an order that only the
shape and the number of SMs decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from .repack import Narrow

_THREADS = 256
_WIDE, _GROUPS = 128, 4  # words of a row, and rows, that a block reads at a time where sums run down the columns
_TALL = 4  # rows of a thread where sums run along the rows: rows of equal parity use the same elements of the vector


@dataclass(frozen=True)
class GemvForm(Narrow):
    """m or n is 1; k is split over `splits` blocks."""

    splits: int = 1

    @property
    def blocks(self) -> int:
        """Number of blocks side by side."""
        return ceil(self.r.rows / (_TALL * self.row_groups)) if self.along else ceil((self.r.columns + 1) // 2 / _WIDE)

    @property
    def whole(self) -> int:
        """The part of k that a loop without conditions reads in whole words.

        Along the rows: the words of a row that lie inside it wherever it begins; the first element and up to two at the end are
        left. Down the columns: the rows that have another row behind them.
        """
        return max(0, self.r.columns // 2 - 1) if self.along else self.r.rows - 1

    @property
    def steps(self) -> int:
        """Number of steps over these."""
        return ceil(self.whole / (self.lanes if self.along else _GROUPS))

    @property
    def lanes(self) -> int:
        """Number of threads that read a row together: one for each 8 words, up to a limit."""
        return next((n for n in (32, 64, 128) if 8 * n >= self.whole), _THREADS)

    @property
    def row_groups(self) -> int:
        """Number of groups of such threads in a block; each group has its own rows."""
        return _THREADS // self.lanes

    @property
    def ahead(self) -> int:
        """Number of steps whose loads are in flight together, chosen for few iterations and few steps without work."""
        share = ceil(self.steps / self.splits)
        return min(range(8, 0, -1), key=lambda n: ceil(share / n) * (n + 0.5))

    @property
    def iterations(self) -> int:
        """Iterations of a block's loop over `ahead` steps."""
        return ceil(self.steps / self.splits / self.ahead)

    def divided(self, sms: int) -> GemvForm:
        """The same problem with k split so that there are about 8 blocks for each SM, where k is long enough."""
        return GemvForm(self.f, self.r, max(1, min(ceil(8 * sms / self.blocks), self.steps // 6, 64)))

    def factor(self, A: Any, B: Any, k: Any) -> Any:
        """Element k of the vector; 0 outside."""
        near = T.min(T.max(k, 0), self.f.k - 1)
        x = A[self.f.at_a(0, 0, near)] if self.of_b else B[self.f.at_b(0, near, 0)]
        return T.if_then_else(T.And(k >= 0, k < self.f.k), T.cast(x, "float32"), T.float32(0))

    def words(self, M: Any) -> Any:
        """The matrix as words."""
        return T.make_tensor(M.data, (self.r.words,), "uint32")

    def half(self, word: Any, number: int) -> Any:
        """An element of a word, converted for the sum."""
        return T.cast(T.reinterpret(T.cast(word >> (16 * number), "uint16"), self.r.element), "float32")


@T.macro
def _finish(v, at, x, C, bias, sa, sb):
    C[v.f.at_c(0, *((0, at) if v.of_b else (at, 0)))] = T.cast(
        v.f.finish(x, bias, sa, sb, at if v.of_b else 0), v.f.types[2])


@T.macro
def _put(v, by, at, x, out):
    """Store a block's partial sum of an element of C, or the element where k is not split.  out: W, C, bias, sa, sb."""
    if v.splits == 1:
        _finish(v, at, x, *out[1:])
    else:
        out[0][by, at] = x


@T.macro
def _down(v, A, B, M, bx, by, out):
    """Sum columns: each word holds elements of two columns, shifted to where rows begin. The last row is read by elements.
    """
    source = v.words(M)
    low = T.alloc_fragment((_GROUPS, _WIDE), "float32")
    high = T.alloc_fragment((_GROUPS, _WIDE), "float32")
    T.clear(low)
    T.clear(high)
    for i in T.serial(v.iterations):
        for u in T.unroll(v.ahead):
            for g, j in T.Parallel(_GROUPS, _WIDE):
                row = ((by * v.iterations + i) * v.ahead + u) * _GROUPS + g
                first = T.min(row, v.whole - 1) * v.r.down
                at = first // 2 + T.min(bx * _WIDE + j, (v.r.columns - 1) // 2)
                beyond = at + 1 if v.r.columns > 2 else T.min(at + 1, v.r.words - 1)
                both = T.cast(source[beyond], "uint64") << 32 | T.cast(source[at], "uint64")
                moved = T.cast(both >> T.cast(first % 2 * 16, "uint64"), "uint32")
                found = T.if_then_else(row < v.whole, moved, T.uint32(0))
                x = v.factor(A, B, row)
                low[g, j] += v.half(found, 0) * x
                high[g, j] += v.half(found, 1) * x
    lows = T.alloc_fragment((_WIDE,), "float32")
    highs = T.alloc_fragment((_WIDE,), "float32")
    T.reduce_sum(low, lows, dim=0)
    T.reduce_sum(high, highs, dim=0)
    for j in T.Parallel(_WIDE):
        column = (bx * _WIDE + j) * 2
        x = v.factor(A, B, T.if_then_else(by == 0, v.f.k - 1, v.f.k))
        for h in T.unroll(2):
            if column + h < v.count:
                more = T.cast(M[v.r.rows - 1, column + h], "float32") * x
                _put(v, by, column + h, T.if_then_else(h == 0, lows[j], highs[j]) + T.if_then_else(by == 0, more, 0), out)


@T.macro
def _across(v, A, B, M, bx, by, out):
    """Sum rows. Where a row begins inside a word, its elements are shifted by one. The ends of rows are read by elements.
    """
    source = v.words(M)
    sums = T.alloc_fragment((_TALL, v.row_groups, v.lanes), "float32")
    for t, j in T.Parallel(v.row_groups, v.lanes):
        for g in T.unroll(_TALL):
            begin = 2 - g * v.r.down % 2  # elements in front of the first whole word
            e = T.if_then_else(j < 2, j, begin + 2 * v.whole + j - 2)
            inside = T.And(T.And(T.Or(j >= 2, j < begin), e < v.f.k), T.And(j < 5, by == 0))
            row = T.min((bx * v.row_groups + t) * _TALL + g, v.r.rows - 1)
            x = T.cast(M[row, T.min(e, v.f.k - 1)], "float32") * v.factor(A, B, e)
            sums[g, t, j] = T.if_then_else(inside, x, T.float32(0))
    for i in T.serial(v.iterations):
        for u in T.unroll(v.ahead):
            for t, j in T.Parallel(v.row_groups, v.lanes):
                near = ((by * v.iterations + i) * v.ahead + u) * v.lanes + j
                for g in T.unroll(_TALL):
                    row = T.min((bx * v.row_groups + t) * _TALL + g, v.r.rows - 1)
                    at = row * v.r.down // 2 + 1 + T.min(near, v.whole - 1)
                    found = T.if_then_else(near < v.whole, source[at], T.uint32(0))
                    k = near * 2 + 2 - g * v.r.down % 2
                    sums[g, t, j] += v.half(found, 0) * v.factor(A, B, k)
                    sums[g, t, j] += v.half(found, 1) * v.factor(A, B, k + 1)
    total = T.alloc_fragment((_TALL, v.row_groups), "float32")
    T.reduce_sum(sums, total, dim=2)
    for g, t in T.Parallel(_TALL, v.row_groups):
        if (bx * v.row_groups + t) * _TALL + g < v.count:
            _put(v, by, (bx * v.row_groups + t) * _TALL + g, total[g, t], out)


def gemv(v: GemvForm) -> Any:
    """The kernel with the parameters (A, B, bias, sa, sb, W, C).

    W: (splits, elements of C) float32 workspace of any contents.
    """
    f = v.f

    @T.prim_func
    def matmul_vector(A: f.a(f.m), B: f.b, bias: f.bias_vector, sa: f.sa(f.m), sb: f.sb,
                      W: T.Tensor((v.splits, v.count), "float32"), C: f.c(f.m)):
        with T.Kernel(v.blocks, v.splits, threads=_THREADS) as (bx, by):
            if v.along:
                _across(v, A, B, B if v.of_b else A, bx, by, (W, C, bias, sa, sb))
            else:
                _down(v, A, B, B if v.of_b else A, bx, by, (W, C, bias, sa, sb))
        if v.splits > 1:
            with T.Kernel(T.ceildiv(v.count, _THREADS), threads=_THREADS) as bx:
                for i in T.Parallel(_THREADS):
                    if bx * _THREADS + i < v.count:
                        total = T.alloc_var("float32", init=0)
                        for p in T.serial(v.splits):
                            total += W[p, bx * _THREADS + i]
                        _finish(v, bx * _THREADS + i, total, C, bias, sa, sb)

    return matmul_vector
