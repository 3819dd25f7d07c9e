"""T.gemm_sp: a GEMM whose operand A holds two of each four columns, with metadata that say which (2:4 sparsity).

wgmma.mma_async.sp multiplies kept values as they lie; elsewhere they are expanded in shared memory for T.gemm.
Source: PTX ISA, "Sparse matrix storage".
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from tilelang.ir import (Alloc, Buffer, Expr, Parallel, Region, Stmt, Store, binary, cast, const, dtype, fresh, load, region_of,
                         replace, select, seq, tile_op, DYNAMIC, FRAGMENT)
from tilelang.target.wgmma import WGMMA_ROWS, expand

from .base import Access, LowerContext
from .gemm import Gemm
from .gemm.wgmma import metadata_fragment


def e_factor(a_dtype: Any, meta_dtype: Any) -> int:
    """Dense columns that one element of metadata describes: 4 bits per group of 4 columns (float32: of 2)."""
    return dtype(meta_dtype).bits // 4 * (2 if dtype(a_dtype).bits == 32 else 4)


@tile_op("gemm_sp")
class SparseGemm(Gemm):
    """c[M, N] += op(a) @ op(b), as Gemm; op(a) holds the M x K / 2 kept values.

    e: (M, K / e_factor), or its transpose if transpose_e, integers: 4 bits for a group of 4 columns, lowest group first, are
    the two kept ones, lower one first.  float32 keeps one of 2: 0b0100 is column 0, 0b1110 column 1.
    words: e is a fragment of the uint32 that wgmma reads, one for 64 bytes of K: of 16-bit types (M / 2, K / 16), the lower
    halves of 8 rows, the upper ones of the next 8; of 8-bit types (M, K / 32).
    """

    e: Region | None = None
    transpose_e: bool = False
    words: bool = False
    sparsity = 2

    @property
    def metadata(self) -> Region:
        """e, which threads read."""
        assert self.e is not None
        return self.e

    @property
    def paired(self) -> bool:
        """Whether an element of e is for two rows."""
        return self.words and self.a.dtype.bits == 16

    def accesses(self) -> tuple[Access, ...]:
        """Those of a GEMM, and e is read."""
        return *super().accesses(), Access(self.metadata, "read")

    def left(self, env: Any) -> Any:
        """op(a), expanded."""
        a, e = super().left(env), env.read(self.metadata)
        e = e.reshape(e.shape[-2:])
        if self.paired:
            halves = np.stack([e & 0xFFFF, e >> 16]).astype(np.uint16)
            e = halves.reshape(2, -1, 8, e.shape[1]).swapaxes(0, 1).reshape(len(a), -1)
        bits = 8 * e.dtype.itemsize
        e = (e.T if self.transpose_e else e).astype(np.int64) & (1 << bits) - 1
        codes = (e[..., None] >> np.arange(0, bits, 4) & 15).reshape(len(a), -1)
        if self.a.dtype.bits != 32:
            return expand(a, codes)
        return np.where((codes[..., None] == (4, 14)), a[..., None], np.zeros((), a.dtype)).reshape(len(a), -1)

    def element(self, row: Any, column: Any) -> Expr:
        """The metadata at a place, as uint32."""
        e = self.metadata
        if self.paired:
            word = load(e.buffer, e.at(row // 16 * 8 + row % 8, column))
            return word >> cast(row // 8 % 2 * 16, "uint32") & const(0xFFFF, "uint32")
        return cast(load(e.buffer, e.at(*((column, row) if self.transpose_e else (row, column)))), "uint32")

    def in_words(self) -> tuple[Buffer, Stmt, SparseGemm]:
        """(a fragment, the loop that fills it with the metadata in the words that wgmma reads, the GEMM that reads it)."""
        paired = self.a.dtype.bits == 16
        shape = (self.m // 2, self.k // 16) if paired else (self.m, self.k // 32)
        words = Buffer("words", shape, dtype("uint32"), FRAGMENT, span=self.span)
        i, j = fresh("i"), fresh("j")
        value = self._bits(i // 8 * 16 + i % 8, j, 16) | self._bits(i // 8 * 16 + i % 8 + 8, j, 16) << const(16, "uint32") \
            if paired else self._bits(i, j, 32)
        fill = Parallel((i, j), (const(shape[0]), const(shape[1])), Store(words, (i, j), value, span=self.span), span=self.span)
        return words, fill, replace(self, e=region_of(words), transpose_e=False, words=True)

    def _bits(self, row: Any, column: Any, wanted: int) -> Expr:
        """Metadata of `wanted` bits, which describe as many columns, as uint32."""
        bits = self.metadata.dtype.bits
        if bits > wanted:
            return self.element(row, column // 2) >> cast(column % 2 * 16, "uint32") & const(0xFFFF, "uint32")
        count = wanted // bits
        shifted = [cast(cast(self.element(row, column * count + n), f"uint{bits}"), "uint32") << const(n * bits, "uint32")
                   for n in range(count)]
        return reduce(lambda x, y: x | y, shifted)

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
        factor = 16 if self.paired else e_factor(self.a.dtype, self.metadata.dtype)
        code = self.element(i, j // factor) >> cast(j % factor // group * 4, "uint32") & const(15, "uint32")
        columns = [j // group * (group // 2) + n for n in range(group // 2)]
        kept = [load(self.a.buffer, self.a.at(*((c, i) if self.transpose_a else (i, c)))) for c in columns]
        if group == 2:
            return select(_equal(code, select(_equal(j % 2, const(0)), const(4, "uint32"), const(14, "uint32"))), kept[0], zero)
        place = cast(j % 4, "uint32")
        second = select(_equal(code >> const(2, "uint32"), place), kept[1], zero)
        return select(_equal(code & const(3, "uint32"), place), kept[0], second)

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Those of a GEMM, and that of a fragment of metadata."""
        out, name, e = super().infer_layout(known), self.plan.instruction, self.metadata
        if name in WGMMA_ROWS:
            out[e.buffer] = metadata_fragment(self, self.plan.warps or (4, 1), known.threads)
        return out

    def lower(self, cx: LowerContext) -> Stmt:
        """By wgmma; where another use of its tiles forbids that, as the GEMM of an operand expanded here."""
        if self.by_wgmma:
            return super().lower(cx)
        e = self.metadata
        if e.buffer.scope_name == FRAGMENT:  # any thread may need any of them
            copy = cx.new_shared(f"{e.buffer.name}_s", e.buffer.shape, e.dtype)
            cx.prepend(cx.parallel(copy.shape, lambda p: Store(copy, p, load(e.buffer, p)), span=self.span))
            return replace(self, e=region_of(copy)).lower(cx)
        tile = cx.new_shared("dense", (self.m, self.k), self.a.dtype)
        cx.prepend(cx.parallel((self.m, self.k), lambda p: Store(tile, p, self.value(*p)), span=self.span))
        return self.dense(tile).lower(cx)


def _equal(a: Expr, b: Expr) -> Expr:
    return binary("eq", a, b)
