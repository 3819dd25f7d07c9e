"""T.gemm_sp: a GEMM whose operand A holds two of each four columns, with metadata that say which (2:4 sparsity).

wgmma.mma_async.sp multiplies kept values as they lie; elsewhere they are expanded in shared memory for T.gemm.
Source: PTX ISA, "Sparse matrix storage".
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from tilelang.ir import (Alloc, Buffer, Expr, Parallel, Region, Stmt, Store, binary, cast, const, dtype, fresh, load, select,
                         seq, tile_op, DYNAMIC)
from tilelang.target.wgmma import expand

from .base import Access, LowerContext
from .gemm import Gemm


def e_factor(a_dtype: Any, meta_dtype: Any) -> int:
    """Dense columns that one element of metadata describes: 4 bits per group of 4 columns (float32: of 2)."""
    return dtype(meta_dtype).bits // 4 * (2 if dtype(a_dtype).bits == 32 else 4)


@tile_op("gemm_sp")
class SparseGemm(Gemm):
    """c[M, N] += op(a) @ op(b), as Gemm; op(a) holds the M x K / 2 kept values.

    e: (M, K / e_factor), or its transpose if transpose_e, integers: 4 bits for a group of 4 columns, lowest group first, are
    the two kept ones, lower one first.  float32 keeps one of 2: 0b0100 is column 0, 0b1110 column 1.
    """

    e: Region | None = None
    transpose_e: bool = False
    sparsity = 2

    @property
    def metadata(self) -> Region:
        """e, which threads read."""
        assert self.e is not None
        return self.e

    def accesses(self) -> tuple[Access, ...]:
        """Those of a GEMM, and e is read."""
        return *super().accesses(), Access(self.metadata, "read")

    def left(self, env: Any) -> Any:
        """op(a), expanded."""
        a, e = super().left(env), env.read(self.metadata)
        e = e.reshape(e.shape[-2:])
        bits = 8 * e.dtype.itemsize
        e = (e.T if self.transpose_e else e).astype(np.int64) & (1 << bits) - 1
        codes = (e[..., None] >> np.arange(0, bits, 4) & 15).reshape(len(a), -1)
        if self.a.dtype.bits != 32:
            return expand(a, codes)
        return np.where((codes[..., None] == (4, 14)), a[..., None], np.zeros((), a.dtype)).reshape(len(a), -1)

    def element(self, row: Any, column: Any) -> Expr:
        """The metadata at a place, as uint32."""
        e = self.metadata
        return cast(load(e.buffer, e.at(*((column, row) if self.transpose_e else (row, column)))), "uint32")

    def word(self, row: Any, column: int, q: Any) -> Expr:
        """The word of metadata of lane q of four for rows `row` and row + 8 and 64 columns of K: target/wgmma.py."""
        bits = self.metadata.dtype.bits
        if self.a.dtype.bits == 8:  # a lane has 8 groups of one row
            row, column, q = row + q % 2 * 8, column, q // 2
            parts = [cast(cast(self.element(row, column // bits + q * (32 // bits) + n), f"uint{bits}"), "uint32")
                     << const(n * bits, "uint32") for n in range(32 // bits)]
            return reduce(lambda x, y: x | y, parts)

        def half(row: Any) -> Expr:
            if bits == 32:
                return self.element(row, column // 32 + q // 2) >> cast(q % 2 * 16, "uint32") & const(0xFFFF, "uint32")
            parts = [cast(cast(self.element(row, column // bits + q * (16 // bits) + n), f"uint{bits}"), "uint32")
                     for n in range(16 // bits)]
            return parts[0] if bits == 16 else parts[0] | parts[1] << const(8, "uint32")

        return half(row) | half(row + 8) << const(16, "uint32")

    def expanded(self) -> Stmt:
        """The same by T.gemm, of kept values that are expanded to a tile in shared memory."""
        tile = Buffer("dense", (self.m, self.k), self.a.dtype, DYNAMIC, span=self.span)
        i, j = fresh("i"), fresh("j")
        fill = Parallel((i, j), (const(self.m), const(self.k)), Store(tile, (i, j), self.value(i, j), span=self.span),
                        span=self.span)
        return seq(Alloc(tile, span=self.span), fill, self.dense(tile))

    def dense(self, tile: Buffer) -> Gemm:
        """The GEMM of an expanded operand."""
        a = Region(tile, (const(0), const(0)), (self.m, self.k), span=self.a.span)
        return Gemm(a, self.b, self.c, False, self.transpose_b, self.policy, self.clear_accum, self.attrs, self.plan, self.span)

    def value(self, i: Any, j: Any) -> Expr:
        """The element (i, j) of the expanded operand."""
        group, zero = 2 if self.a.dtype.bits == 32 else 4, cast(0, self.a.dtype)
        factor = e_factor(self.a.dtype, self.metadata.dtype)
        code = self.element(i, j // factor) >> cast(j % factor // group * 4, "uint32") & const(15, "uint32")
        columns = [j // group * (group // 2) + n for n in range(group // 2)]
        kept = [load(self.a.buffer, self.a.at(*((c, i) if self.transpose_a else (i, c)))) for c in columns]
        if group == 2:
            return select(_equal(code, select(_equal(j % 2, const(0)), const(4, "uint32"), const(14, "uint32"))), kept[0], zero)
        place = cast(j % 4, "uint32")
        second = select(_equal(code >> const(2, "uint32"), place), kept[1], zero)
        return select(_equal(code & const(3, "uint32"), place), kept[0], second)

    def lower(self, cx: LowerContext) -> Stmt:
        """By wgmma; where another use of its tiles forbids that, as the GEMM of an operand expanded here."""
        if self.by_wgmma:
            return super().lower(cx)
        tile = cx.new_shared("dense", (self.m, self.k), self.a.dtype)
        cx.prepend(cx.parallel((self.m, self.k), lambda p: Store(tile, p, self.value(*p)), span=self.span))
        return self.dense(tile).lower(cx)


def _equal(a: Expr, b: Expr) -> Expr:
    return binary("eq", a, b)
