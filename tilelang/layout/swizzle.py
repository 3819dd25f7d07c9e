"""Constructors of shared layouts: linear, padded, XOR-swizzled, swizzled boxes.  Sizes in elements, widths in bits.

Shared memory has 32 banks of 4 bytes; the accesses of one phase (32 lanes of 4 bytes, 16 of 8, 8 of 16) conflict when
they touch different words of one bank (CUDA C++ Programming Guide, "Shared Memory").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np

from tilelang.errors import error, facts
from .distinct import distinct
from .fitted import static_extents
from .layout import Layout, Swizzle, row_major, xor
from .swizzled_boxes import box_width, swizzled_box_layout

LINE_BYTES = 128  # 32 banks of 4 bytes


def linear_layout(shape: Sequence[int]) -> Layout:
    """Row-major, no padding."""
    return _linear(tuple(shape))


@lru_cache(maxsize=256)  # layouts are values: one object per shape saves its table and its index code
def _linear(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, lambda *idx: row_major(idx, shape), size=math.prod(shape), trusted=True)


def padded_layout(shape: Sequence[int], pad: int) -> Layout:
    """Row-major with `pad` unused elements at the end of each row."""
    shape = tuple(shape)
    wide = (*shape[:-1], shape[-1] + pad)
    return Layout(shape, lambda *idx: row_major(idx, wide), size=math.prod(wide), trusted=True)


def swizzled_layout(shape: Sequence[int], bits: int, chunk_bytes: int = 16, every: int = 0, line: int = LINE_BYTES) -> Layout:
    """Rows of chunks, the chunk index XORed with the row so that a column of chunks covers all banks.

    chunk_bytes: 4, 8 or 16; a row is padded to whole chunks.  With C chunks a row and L chunks a 128-byte line, the low
    g = gcd(C, L) positions are permuted by row // (L / g): then the same chunk of L consecutive rows lies in L
    different places modulo the line, for any C.  For rows of 128, 64 or 32 bytes this is the hardware's swizzle mode of
    that width (PTX ISA, "Swizzling modes").  Leading dimensions are slices one after another.
    every: number of rows after which the XOR changes, instead of L / g; for columns that are read with this row stride.
    line: bytes of all banks.
    Raises layout-invalid for fewer than two dimensions.
    """
    shape = tuple(shape)
    if len(shape) < 2:
        raise error("layout-invalid", f"a swizzled layout needs rows and columns, found shape {shape}",
                    expected="at least 2 dimensions")
    return _swizzled(shape, bits, chunk_bytes, every, line)


@lru_cache(maxsize=256)
def _swizzled(shape: tuple[int, ...], bits: int, chunk_bytes: int, every: int, line_bytes: int) -> Layout:
    chunk = chunk_bytes * 8 // bits
    chunks = -(-shape[-1] // chunk)
    line = line_bytes // chunk_bytes
    g = gcd(chunks, line)
    per = every or line // g
    wide = (*shape[:-1], chunks * chunk)
    hardware = chunk_bytes == 16 and line_bytes == LINE_BYTES and chunks == g and per == line // g
    swizzle = Swizzle(chunk, g, per, g * 16 if hardware else 0) if g > 1 else None

    def fn(*idx: Any) -> Any:
        *lead, i, j = idx
        if g > 1:
            j = xor(j // chunk, i // per % g) * chunk + j % chunk
        return row_major((*lead, i, j), wide)

    return Layout(shape, fn, size=math.prod(wide), swizzle=swizzle, trusted=True)


# ---- bank conflicts -------------------------------------------------------------------------------------------------


def bank_conflicts(table: np.ndarray, access: np.ndarray, bits: int, width: int = 1) -> int:
    """Extra shared-memory transactions of one warp access, beyond the fewest its bytes need.

    table: Layout.table().  access: int[lanes, ndim], the first element each lane touches.  bits: element width.
    width: consecutive elements a lane touches.  Lanes are served in phases of 128 bytes; lanes of one phase that touch
    the same word share it.
    """
    start = table[tuple(access.T)] * bits // 8
    return phase_conflicts(start, max(4, bits * width // 8))


def phase_conflicts(start: np.ndarray, nbytes: int) -> int:
    """Extra transactions of lanes that access nbytes (4, 8 or 16) at byte addresses `start`."""
    lanes = min(len(start), LINE_BYTES // nbytes)
    extra = 0
    for k in range(0, len(start), lanes):
        first = start[k:k + lanes] // 4
        words = distinct(first[:, None] + np.arange(max(1, nbytes // 4))[None, :])
        extra += int(np.bincount(words % 32, minlength=32).max()) - 1
    return extra


# ---- public constructors --------------------------------------------------------------------------------------------


class SwizzleMode(IntEnum):
    """Hardware swizzle modes of TMA and matrix descriptors."""

    NONE = 0
    SWIZZLE_32B = 1
    SWIZZLE_64B = 2
    SWIZZLE_128B = 3

    def is_none(self) -> bool: return self is SwizzleMode.NONE
    def is_swizzle_32b(self) -> bool: return self is SwizzleMode.SWIZZLE_32B
    def is_swizzle_64b(self) -> bool: return self is SwizzleMode.SWIZZLE_64B
    def is_swizzle_128b(self) -> bool: return self is SwizzleMode.SWIZZLE_128B
    def wgmma_layout_type(self) -> int: return (0, 3, 2, 1)[self]
    def tcgen05_layout_type(self) -> int: return (0, 6, 4, 2)[self]
    def swizzle_byte_size(self) -> int: return (1, 32, 64, 128)[self]
    def swizzle_atom_size(self) -> int: return (1, 32, 64, 128)[self]
    def smem_alignment(self) -> int: return (128, 256, 512, 1024)[self]

    @staticmethod
    def from_ordinal(n: int) -> SwizzleMode:
        return SwizzleMode(n)


def _shape_bits(buf: Any) -> tuple[tuple[int, ...], int]:
    """The shape and the bits of an element of a buffer, or of the buffer of a region."""
    whole = getattr(buf, "buffer", None)
    buf = whole if hasattr(whole, "shape") else buf
    if not hasattr(buf, "shape") or not hasattr(buf, "dtype"):
        raise facts(TypeError(f"a layout constructor takes a buffer, found {type(buf).__name__}"),
                    "a buffer", f"a {type(buf).__name__}")
    if not all(isinstance(s, int) for s in buf.shape):
        raise error("layout-invalid", f"a layout needs «a static shape», `{buf.name}` has {buf.shape}",
                    found=str(tuple(buf.shape)))
    return tuple(buf.shape), buf.dtype.bits * buf.dtype.lanes


def make_swizzled_layout(buf: Any, k_major: bool = True, allow_pad: bool = True) -> Layout:
    """The swizzled layout of a GEMM operand: free of bank conflicts for 8 rows of 16 bytes.

    Rows of a multiple of 32 bytes are divided into the widest boxes that TMA and wgmma can swizzle; other rows are XOR-swizzled
    as a whole.  allow_pad=False rejects rows that are not whole 16-byte chunks.
    """
    shape, bits = _shape_bits(buf)
    if not allow_pad and shape[-1] * bits % 128:
        raise error("layout-invalid", f"`{buf.name}`: rows of {shape[-1]} x {bits} bits are not whole 16-byte chunks",
                    expected="rows of a multiple of 16 bytes", found=f"{shape[-1]} elements of {bits} bits",
                    hint="pad the row, or pass allow_pad=True")
    width = box_width(shape[-1], bits) if len(shape) > 1 else 0
    return swizzled_box_layout(shape, bits, width) if width > 16 else swizzled_layout(shape, bits)


def make_linear_layout(*shape: Any) -> Layout:
    """Row-major.  shape: a buffer, a shape, or its extents."""
    given = shape[0] if len(shape) == 1 else shape
    return linear_layout(static_extents(given, "Layout") if isinstance(given, (int, tuple, list)) else _shape_bits(given)[0])


def _bank_swizzled(what: str, nbytes: int, buf: Any, continuous: int | None, element_size: int | None,
                   stride: int | None = None) -> Layout:
    rows = buf if stride is None else stride
    if continuous is None and element_size is None and stride is None:
        return swizzled_box_layout(*_shape_bits(buf), nbytes)
    sizes = (rows, continuous, element_size)
    if continuous is None or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise facts(TypeError(f"{what} takes a buffer, or rows, elements of a row and bits of an element; found {sizes}"),
                    "a buffer or three positive integers", str(sizes))
    return swizzled_box_layout((rows, continuous), element_size, nbytes)


def make_full_bank_swizzled_layout(buf: Any = None, continuous: int | None = None, element_size: int | None = None, *,
                                   stride: int | None = None) -> Layout:
    """128-byte swizzle, with rows divided into boxes of 128 bytes.

    Takes a buffer; or rows (also named `stride`), elements of a row and bits of an element.

    >>> make_full_bank_swizzled_layout(64, 64, 16).shape
    (64, 64)
    """
    return _bank_swizzled("make_full_bank_swizzled_layout", 128, buf, continuous, element_size, stride)


def make_half_bank_swizzled_layout(buf: Any = None, continuous: int | None = None, element_size: int | None = None, *,
                                   stride: int | None = None) -> Layout:
    """64-byte swizzle, with rows divided into boxes of 64 bytes.  Arguments as for make_full_bank_swizzled_layout."""
    return _bank_swizzled("make_half_bank_swizzled_layout", 64, buf, continuous, element_size, stride)


def make_quarter_bank_swizzled_layout(buf: Any = None, continuous: int | None = None, element_size: int | None = None, *,
                                      stride: int | None = None) -> Layout:
    """32-byte swizzle, with rows divided into boxes of 32 bytes.  Arguments as for make_full_bank_swizzled_layout."""
    return _bank_swizzled("make_quarter_bank_swizzled_layout", 32, buf, continuous, element_size, stride)


def make_wgmma_swizzled_layout(buf: Any, continuity: int | None = None, k_major: bool = True) -> Layout:
    """The widest hardware swizzle whose boxes divide the contiguous extent (continuity: its elements, default the row)."""
    shape, bits = _shape_bits(buf)
    row = (continuity or shape[-1]) * bits // 8
    for nbytes in (128, 64, 32):
        if row % nbytes == 0:
            return swizzled_box_layout(shape, bits, nbytes)
    return linear_layout(shape)


def make_volta_swizzled_layout(buf: Any, is_a: bool = True, k_inner: bool = True) -> Layout:
    """The layout of an operand on sm_70, which reads rows by ordinary vector loads: XOR-swizzled chunks of 16 bytes.

    is_a, k_inner: which operand, and whether its rows run along k.  The layout is the same for all of them.
    """
    return make_swizzled_layout(buf)


def make_cutlass_metadata_layout(buf: Any, mma_dtype: Any = "float16", arch: Any = None, **kwargs: Any) -> Layout:
    """The layout of 2:4 sparsity metadata in shared memory: row-major, as T.gemm_sp reads it on every architecture."""
    return make_linear_layout(buf)
