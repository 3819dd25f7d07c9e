"""The layout of shared tiles in swizzled boxes, which TMA writes and wgmma descriptors read.

A tile of R rows is divided along its contiguous dimension into boxes of W bytes: 128, 64 or 32 with the hardware's swizzle of
that width, 16 without swizzle.  The rows of a box are consecutive.  For byte column c of row r, inside its box

    y = r*W + c % W,    place = y ^ (((y >> 7) & (W/16 - 1)) << 4),    box c / W starts at (c / W) * R*W.

The hardware permutes the bits of absolute shared addresses, so a tile must start at a multiple of 8*W.  Sources: PTX ISA,
"Matrix Descriptor Format" and "Swizzling Modes"; CUDA Driver API, cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tilelang.ir import dtype
from tilelang.ir.record import record

from .layout import Layout, Swizzle, row_major, xor
from tilelang.errors import error

WIDTHS = (128, 64, 32, 16)
_ATOM_ROWS = 8  # rows after which every swizzle repeats
_BOX_ROWS = 256  # largest extent of a TMA box


@record
class Descriptor:
    """Strides of a wgmma operand in bytes: lbo (leading), sbo (stride); swizzle: 0 (none), 32, 64 or 128."""

    lbo: int
    sbo: int
    swizzle: int


@record
class Box:
    """A TMA box of a tile: first row and column and its extents, in elements; `offset` in bytes from the tile."""

    row: int
    column: int
    rows: int
    columns: int
    offset: int


@record
class SwizzledBoxes:
    """The swizzled boxes of one tile (one stage of a buffer).

    rows: rows of the tile.  columns: elements of a row.  bits: width of an element.  width: W, bytes of a row of a box.
    """

    rows: int
    columns: int
    bits: int
    width: int

    @property
    def swizzle(self) -> int:
        """The swizzle of the tensor map and of descriptors: 0, 32, 64 or 128 bytes."""
        return self.width if self.width > 16 else 0

    @property
    def box_row_bytes(self) -> int:
        return self.rows * self.width

    @property
    def box_columns(self) -> int:
        return self.width * 8 // self.bits

    @property
    def count(self) -> int:
        return -(-self.columns // self.box_columns)

    @property
    def bytes(self) -> int:
        """Size of the tile in bytes, padding included."""
        return self.count * self.box_row_bytes

    @property
    def align(self) -> int:
        """Alignment of the start of the tile, in bytes."""
        return _ATOM_ROWS * self.width

    @property
    def transaction_bytes(self) -> int:
        """Bytes that the boxes of the tile count on an mbarrier: always whole boxes, also where they are out of bounds."""
        return sum(b.rows * b.columns for b in self.boxes()) * self.bits // 8

    def boxes(self) -> tuple[Box, ...]:
        """The TMA boxes that write (or read) the tile: one for each W bytes of a row, divided at 256 rows."""
        w = self.box_columns
        return tuple(Box(r, p * w, min(_BOX_ROWS, self.rows - r), min(w, self.columns - p * w),
                         p * self.box_row_bytes + r * self.width)
                     for p in range(self.count) for r in range(0, self.rows, _BOX_ROWS))

    def descriptor(self, major: str) -> Descriptor:
        """Strides of the tile as a wgmma operand.

        major "k": rows are M or N, columns K.  major "mn": rows are K, columns M or N (16-bit types only).
        """
        w = self.width
        if major == "k":
            return Descriptor(0, _ATOM_ROWS * w, w) if w > 16 else Descriptor(self.box_row_bytes, _ATOM_ROWS * 16, 0)
        if w > 16:
            return Descriptor(self.box_row_bytes if self.count > 1 else 0, _ATOM_ROWS * w, w)
        return Descriptor(_ATOM_ROWS * 16, self.box_row_bytes, 0)

    def offset(self, major: str, start: Any, k: Any) -> Any:
        """Offset in bytes from the start of the tile to the address in the descriptor of a k-step.

        start: first row of M or column of N (elements).  k: first element of K, a multiple of the k-step.  Both are ints or
        index expressions.  For major "mn", start is a multiple of the columns of a box, or the operand ends inside its box.
        """
        along, row = (k, start) if major == "k" else (start, k)
        w, size = self.box_columns, self.bits // 8
        inside = along * size if self.count == 1 else along // w * self.box_row_bytes + along % w * size
        return row * self.width + inside


def swizzled_box_layout(shape: Sequence[int], element: Any, swizzle_bytes: int) -> Layout:
    """Layout of a shared buffer in boxes of swizzle_bytes a row (128, 64, 32; 16 or 0: no swizzle).

    element: element type, or its width in bits.  Leading dimensions are stages, which follow one another in storage.  Raises
    layout-invalid unless rows consist of whole boxes.
    """
    shape = tuple(shape)
    bits = element if isinstance(element, int) else dtype(element).bits * dtype(element).lanes
    width = swizzle_bytes or 16
    panel = width * 8 // bits
    if width not in WIDTHS:
        raise error("layout-invalid", f"swizzle atoms are «128, 64, 32 or 16 bytes» wide, found {swizzle_bytes}")
    if len(shape) < 2 or shape[-1] % panel:
        raise error("layout-invalid", f"{width}-byte swizzle atoms need «rows of a multiple of {panel} elements», found shape "
                    f"{shape}")
    return _panelled(shape, bits, width)


@lru_cache(maxsize=256)  # one object per shape, as for other layouts: every GEMM requests the layouts of its operands again
def _panelled(shape: tuple[int, ...], bits: int, width: int) -> Layout:
    chunk, panel = 128 // bits, width * 8 // bits
    g = width // 16
    per = 8 // g
    rows, count = shape[-2], shape[-1] // panel

    def fn(*idx: Any) -> Any:
        *lead, i, j = idx
        inside = xor(j % panel // chunk, i // per % g) * chunk + j % chunk if g > 1 else j % panel
        return row_major((*lead, j // panel, i, inside), (*shape[:-2], count, rows, panel))

    return Layout(shape, fn, size=math.prod(shape), swizzle=Swizzle(chunk, g, per, width), trusted=True)


def box_width(columns: int, bits: int) -> int:
    """Largest box width in bytes that divides rows of `columns` elements; 0 when they are not whole 16-byte chunks."""
    return next((w for w in WIDTHS if columns * bits % (w * 8) == 0), 0)


def boxes_of(layout: Layout, element: Any) -> SwizzledBoxes | None:
    """The swizzled boxes of a layout, None when TMA and wgmma cannot use it.

    Every stage and every box must start at a multiple of the 8 rows of a swizzle atom: with the 16-byte rows of no swizzle
    these are the 128 bytes that TMA requires.
    """
    s = layout.swizzle
    bits = element if isinstance(element, int) else dtype(element).bits * dtype(element).lanes
    if s is None or not s.bytes or len(layout.shape) < 2:
        return None
    out = SwizzledBoxes(layout.shape[-2], layout.shape[-1], bits, s.bytes)
    versions = math.prod(layout.shape[:-2])
    if out.bytes * 8 * versions != layout.size * bits:
        return None
    if out.rows % _ATOM_ROWS and (out.count > 1 or versions > 1):
        return None
    return out
