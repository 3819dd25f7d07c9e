"""Table of the MMA instructions of a warp group (wgmma.mma_async, sm_90a): operand fragments, descriptors, NumPy definition.

C (64 x N) += A (64 x K) @ B (K x N) over 128 threads.  B is in shared memory, A in shared memory or in registers.  One
instruction processes 32 bytes of K.  With warp w = t / 32, g = t % 32 / 4, q = t % 4 of thread t, and e elements in a
32-bit register,

    A  register j, element h:  row 16*w + g + 8*(j % 2),         column  e*q + 4*e*(j / 2) + h
    C  element i:              row 16*w + g + 8*(i / 2 % 2),     column  8*(i / 4) + 2*q + i % 2

A sparse instruction (wgmma.mma_async.sp) processes 32 bytes of kept values of A, which stand for 64 bytes of K: of each group
of 4 columns two are kept.  Each thread gives a word of metadata: 4 bits for a group, the kept columns, lower one first.
With 16-bit types the low half of the word is for row 16*w + g, the high half for row 16*w + g + 8, and the selector s says that
lanes q = 2*s and 2*s + 1 have the groups 0 to 3 and 4 to 7.  With 8-bit types the word is for row 16*w + g + 8*(q % 2) and the
groups from 8*(q / 2) on.

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Register Fragments", "Matrix Descriptor Format"; where
the metadata lie was measured on an H200.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tilelang.errors import InternalError
from tilelang.ir import dtype
from tilelang.ir.record import record
from tilelang.layout import Fragment

from .mma import PTX_TYPES, operand_dtype
from .mma_row import multiply_add, register as _r, thread as _t

K_STEP_BYTES = 32  # bytes of K that one instruction processes
_FP8 = ("float8_e4m3", "float8_e5m2")
_INT8 = ("int8", "uint8")
# (a, b) -> accumulators
_TYPES: dict[tuple[str, str], tuple[str, ...]] = {
    ("float16", "float16"): ("float32", "float16"), ("bfloat16", "bfloat16"): ("float32",),
    ("tfloat32", "tfloat32"): ("float32",),
    **{(a, b): ("float32", "float16") for a in _FP8 for b in _FP8},
    **{(a, b): ("int32",) for a in _INT8 for b in _INT8}}
_ALL_N = tuple(range(8, 257, 8))
_INT_N = (8, 16, 24, *range(32, 257, 16))


@record
class WgmmaRow:
    """One instruction shape and type.

    shape: (64, n, k).  b: None, it is always in shared memory.  sparse: of A half of the columns are stored.
    """

    name: str
    shape: tuple[int, int, int]
    a_dtype: dtype
    b_dtype: dtype
    c_dtype: dtype
    b: None = None
    min_arch: int = 90
    threads: int = 128
    sparse: bool = False

    @property
    def a(self) -> Fragment:
        """The (64, k) operand when it is in registers, over 128 threads; registers counted in elements."""
        return register_operand_fragment(self.a_dtype.bits)

    @property
    def c(self) -> Fragment:
        """The (64, n) accumulator, over 128 threads; registers counted in elements."""
        return accumulator_fragment(self.shape[1])

    @property
    def ptx(self) -> str:
        """The instruction's name."""
        return f"wgmma.mma_async{'.sp' * self.sparse}.sync.aligned.{self.name.removeprefix('wgmma.').removeprefix('sp.')}"

    @property
    def b_bytes(self) -> int:
        """Bytes of K that one instruction processes of B."""
        return K_STEP_BYTES << self.sparse

    @property
    def majors(self) -> tuple[str, ...]:
        """Orders an operand in shared memory may have: "k" (K contiguous) and, for 16-bit types, "mn"."""
        return ("k", "mn") if self.a_dtype.bits == 16 else ("k",)

    @property
    def c_registers(self) -> int:
        """32-bit registers of the accumulator a thread holds."""
        return self.c.registers * self.c_dtype.bits // 32

    def function(self, a_in_registers: bool, a_major: str, b_major: str, selector: int = 0) -> str:
        """C name of the row's wrapper for operands of these kinds.  Raises InternalError for an order it does not have."""
        majors = (b_major,) if a_in_registers else (a_major, b_major)
        if any(m not in self.majors for m in majors):
            raise InternalError(f"{self.name} takes operands of order {', '.join(self.majors)}, found {majors}")
        orders = "".join("k" if m == "k" else "m" for m in majors)
        return f"{self.name.replace('.', '_')}_{'rs' if a_in_registers else 'ss'}_{orders}" + f"_{selector}" * self.sparse

    def reference(self, a: Any, b: Any, c: Any, scale_d: Any = True) -> np.ndarray:
        """c + a @ b, or a @ b where scale_d is false: exact products, accumulated in the type of the accumulator.

        a: (..., 64, k), b: (..., k, n), c: (..., 64, n).  tf32 operands are truncated to 10 mantissa bits.  The hardware
        accumulates fp8 products with fewer bits than float32 has, so that their results must be compared with a tolerance.
        """
        start = np.where(np.asarray(scale_d)[..., None, None], np.asarray(c), np.zeros((), np.asarray(c).dtype))
        return multiply_add(self.a_dtype, self.c_dtype, a, b, start)

    def expanded(self, kept: np.ndarray, words: np.ndarray, selector: int) -> np.ndarray:
        """The rows of A, (rows, k), of the kept values of warps, (rows, k / 2), and the words of metadata of their lanes."""
        rows = len(kept)
        if self.a_dtype.bits == 8:
            own = words.reshape(-1, 8, 2, 2).transpose(0, 3, 1, 2).reshape(rows, 2)
        else:
            halves = np.stack([words & 0xFFFF, words >> 16]).reshape(2, -1, 8, 4).transpose(1, 0, 2, 3).reshape(rows, 4)
            own = halves[:, 2 * selector:2 * selector + 2]
        codes = own[..., None] >> 4 * np.arange(self.shape[2] // 8) & 15
        return expand(kept, codes.reshape(rows, -1))


def expand(kept: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The rows (rows, 4 * groups) of kept values (rows, 2 * groups), with the 4 bits of each group (rows, groups)."""
    places = np.stack([codes & 3, codes >> 2], -1).astype(np.int64)
    out = np.zeros((*codes.shape, 4), kept.dtype)
    np.put_along_axis(out, places, kept.reshape(places.shape), 2)
    return out.reshape(len(kept), -1)


@cache
def accumulator_fragment(n: int) -> Fragment:
    """The accumulator fragment of an instruction with n columns."""
    return Fragment((64, n), ((_t(4, 32), _r(2, 2), _t(8, 4)), (_r(n // 8, 4), _t(4, 1), _r(2, 1))), threads=128)


@cache
def metadata_words(bits: int) -> Fragment:
    """The fragment of the words of metadata of 64 rows and 64 columns of a sparse A whose elements have this width in bits.

    Of 16 bits: word (i, j) is of rows 16 * (i / 8) + i % 8 and the one 8 below, 16 columns from 16 * j on; of 8 bits: of row i,
    32 columns from 32 * j on.
    """
    if bits == 16:
        return Fragment((32, 4), ((_t(4, 32), _t(8, 4)), (_t(4, 1),)), threads=128)
    return Fragment((64, 2), ((_t(4, 32), _t(2, 1), _t(8, 4)), (_t(2, 2),)), threads=128)


@cache
def register_operand_fragment(bits: int) -> Fragment:
    """The fragment of operand A in registers, for elements of this width in bits."""
    e = 32 // bits
    return Fragment((64, 8 * e), ((_t(4, 32), _r(2, e), _t(8, 4)), (_r(2, 2 * e), _t(4, 1), _r(e, 1))), threads=128)


def adjacent_rows(f: Fragment, bits: int) -> Fragment:
    """The fragment of an instruction whose row g + 8*h of each 16 stands for row 2*g + h of the tile, for operands of 8 bits.

    A lane then has two neighbouring rows, which lie in one 16-bit unit where K is the outer dimension of a tile of bytes.  So
    it has with 32 bits; there the lanes of half a warp take two 16-byte units at a distance of four of each of their four
    rows of K, which swizzling by 128 bytes puts in different banks.
    """
    warp, half, lanes = f.modes[0][0], f.modes[0][-2], f.modes[0][-1]
    rows = (warp, lanes, half) if bits == 8 else (*(_t(2, stride) for stride in (64, 8, 32, 16, 4)), half)
    return Fragment(f.shape, (rows, f.modes[1]), threads=f.threads)


def _name(n: int, a: str, b: str, c: str, sparse: bool = False) -> str:
    return f"wgmma.{'sp.' * sparse}m64n{n}k{_depth(a, sparse)}.{PTX_TYPES[c]}.{PTX_TYPES[a]}.{PTX_TYPES[b]}"


def _depth(a: str, sparse: bool) -> int:
    return (K_STEP_BYTES << sparse) * 8 // dtype(a).bits


def _sizes(a: str) -> tuple[int, ...]:
    return _INT_N if a in _INT8 else _ALL_N


WGMMA_ROWS: dict[str, WgmmaRow] = {
    _name(n, a, b, c, sp): WgmmaRow(_name(n, a, b, c, sp), (64, n, _depth(a, sp)), dtype(a), dtype(b), dtype(c), sparse=sp)
    for sp in (False, True) for (a, b), accumulators in _TYPES.items() for c in accumulators for n in _sizes(a)
    if not sp or a != "tfloat32"}


def wgmma_sizes(a_dtype: Any, b_dtype: Any, c_dtype: Any, sparse: bool = False) -> tuple[int, ...]:
    """Values of N for operands and accumulator of these element types, ascending; () when there is no row."""
    a, b, c = f"{operand_dtype(a_dtype)}", f"{operand_dtype(b_dtype)}", f"{dtype(c_dtype)}"
    return _sizes(a) if c in _TYPES.get((a, b), ()) and not (sparse and a == "tfloat32") else ()


def wgmma_row(n: int, a_dtype: Any, b_dtype: Any, c_dtype: Any, sparse: bool = False) -> WgmmaRow | None:
    """The row with n columns for these element types, None when there is none."""
    if n not in wgmma_sizes(a_dtype, b_dtype, c_dtype, sparse):
        return None
    return WGMMA_ROWS[_name(n, f"{operand_dtype(a_dtype)}", f"{operand_dtype(b_dtype)}", f"{dtype(c_dtype)}", sparse)]


# ---- descriptors ------------------------------------------------------------------------------------------------------

SWIZZLE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes: code in a descriptor


def encode_descriptor(address: int, lbo: int, sbo: int, swizzle: int) -> int:
    """The 64-bit descriptor of an operand.  address, lbo, sbo: bytes (address in shared memory).  swizzle: 0, 32, 64, 128."""
    return (address >> 4 & 0x3FFF | (lbo >> 4 & 0x3FFF) << 16 | (sbo >> 4 & 0x3FFF) << 32
            | SWIZZLE_CODE[swizzle] << 62)


def decode_descriptor(value: int) -> tuple[int, int, int, int]:
    """(address, lbo, sbo, swizzle) of a descriptor."""
    swizzle = {code: width for width, code in SWIZZLE_CODE.items()}[value >> 62 & 3]
    return (value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4, swizzle


def operand_addresses(descriptor: int, major: str, extent: int, element_bytes: int,
                      k_bytes: int = K_STEP_BYTES) -> np.ndarray:
    """int64[extent, k]: the shared-memory address in bytes of each element of the k-step that a descriptor describes.

    extent: rows of A (64) or columns of B (n).  k_bytes: of K.  The swizzle acts on the bits of the address.
    """
    start, lbo, sbo, swizzle = decode_descriptor(descriptor)
    m = np.arange(extent, dtype=np.int64)[:, None]
    k = np.arange(k_bytes // element_bytes, dtype=np.int64)[None, :]
    along, across = (k * element_bytes, m) if major == "k" else (m * element_bytes, k)
    if swizzle:
        panel = 0 if major == "k" else along // swizzle * lbo
        place = start + panel + across // 8 * sbo + across % 8 * swizzle + (along if major == "k" else along % swizzle)
        return place ^ ((place >> 7 & swizzle // 16 - 1) << 4)
    chunk, group = (lbo, sbo) if major == "k" else (sbo, lbo)
    return start + along // 16 * chunk + across // 8 * group + across % 8 * 16 + along % 16
