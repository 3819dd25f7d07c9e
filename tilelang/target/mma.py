"""Table of the MMA instructions of a warp (mma.sync): operand layouts, PTX name and NumPy definition of each.

Layouts follow the PTX ISA, "Warp-level matrix instructions": with lane l, g = l / 4, q = l % 4 and e elements in a
32-bit register,

    A (M x K)  register j, element h:  row g + 8*(j % 2),        column  e*q + 4*e*(j / 2) + h
    B (K x N)  register j, element h:  row e*q + 4*e*j + h,      column  g
    C (M x N)  element i:              row g + 8*(i / 2),        column  2*q + i % 2

which holds for 32-, 16- and 8-bit operands alike (figures of m16n8k8 .tf32, m16n8k16 .f16/.bf16, m16n8k32 .s8/.e4m3).
The fp64 m8n8k4 and the sm_75 int8 m8n8k16 shapes have their own figures.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import dtype, numpy_dtype
from tilelang.ir.record import record
from tilelang.layout import Fragment, Mode

PTX_TYPES = {"float16": "f16", "bfloat16": "bf16", "tfloat32": "tf32", "float32": "f32", "float64": "f64", "int8": "s8",
             "uint8": "u8", "int32": "s32", "float8_e4m3": "e4m3", "float8_e5m2": "e5m2"}
_ALIASES = {"float8_e4m3fn": "float8_e4m3"}


@record
class MmaRow:
    """c += a @ b over the 32 lanes of a warp.

    shape: (m, n, k).  a: Fragment of the (m, k) operand, b: of the (k, n) operand, c: of the (m, n) accumulator; each
    over 32 threads, registers counted in elements.  ptx: instruction name.  min_arch: first sm number that has it.
    """

    name: str
    shape: tuple[int, int, int]
    a_dtype: dtype
    b_dtype: dtype
    c_dtype: dtype
    a: Fragment
    b: Fragment
    c: Fragment
    ptx: str
    min_arch: int

    @property
    def registers(self) -> tuple[int, int, int]:
        """32-bit registers (64-bit for float64) a lane passes for (a, b, c)."""
        return tuple(max(1, frag.registers * dt.bits // self.register_bits)  # type: ignore[return-value]
                     for frag, dt in ((self.a, self.a_dtype), (self.b, self.b_dtype), (self.c, self.c_dtype)))

    @property
    def register_bits(self) -> int:
        return 64 if self.c_dtype == "float64" else 32

    def reference(self, a: Any, b: Any, c: Any) -> np.ndarray:
        """c + a @ b as the tensor core computes it: exact products, accumulated in the type of the accumulator.

        a: (..., m, k), b: (..., k, n), c: (..., m, n) arrays; leading dimensions broadcast.  tf32 operands are truncated to
        10 mantissa bits, because the hardware ignores the other bits.  The order of summation is unspecified.
        """
        return multiply_add(self.a_dtype, self.c_dtype, a, b, np.asarray(c))


def multiply_add(operands: dtype, accumulator: dtype, a: Any, b: Any, c: np.ndarray) -> np.ndarray:
    """c + a @ b as tensor cores compute it, for operands and an accumulator of these types (MmaRow.reference)."""
    c_type = numpy_dtype(accumulator)
    if accumulator.is_int:
        exact = np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32))  # |sum| <= 32 * 2**16
        return np.add(c.astype(c_type), exact.astype(np.int64).astype(c_type))
    wide = np.float64 if accumulator == "float64" else np.float32
    a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    if operands == "tfloat32":
        a, b = truncate_tf32(a), truncate_tf32(b)
    return (np.matmul(a, b) + c.astype(wide)).astype(c_type)  # type: ignore[no-any-return]


def truncate_tf32(x: np.ndarray) -> np.ndarray:
    """float32 values with the low 13 mantissa bits cleared."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _t(size: int, stride: int) -> Mode:
    return Mode(size, "thread", stride)


def _r(size: int, stride: int) -> Mode:
    return Mode(size, "register", stride)


def _fragment(shape: tuple[int, int], rows: tuple[Mode, ...], cols: tuple[Mode, ...]) -> Fragment:
    return Fragment(shape, (rows, cols), threads=32)


def _m16n8(k: int, bits: int) -> tuple[Fragment, Fragment, Fragment]:
    """Operand fragments of the m16n8 family (module docstring)."""
    e = 32 // bits
    halves = k // (4 * e)  # 32-bit registers along k: 2, or 1 for the half-length shapes
    a = _fragment((16, k), (_r(2, e), _t(8, 4)), (_r(halves, 2 * e), _t(4, 1), _r(e, 1)))
    b = _fragment((k, 8), (_r(halves, e), _t(4, 1), _r(e, 1)), (_t(8, 4),))
    c = _fragment((16, 8), (_r(2, 2), _t(8, 4)), (_t(4, 1), _r(2, 1)))
    return a, b, c


def _m8n8(k: int, e: int) -> tuple[Fragment, Fragment, Fragment]:
    """PTX ISA figures of m8n8k4 .f64 (e = 1) and m8n8k16 .s8 (e = 4): one register an operand."""
    a = _fragment((8, k), (_t(8, 4),), (_t(4, 1), _r(e, 1)))
    b = _fragment((k, 8), (_t(4, 1), _r(e, 1)), (_t(8, 4),))
    c = _fragment((8, 8), (_t(8, 4),), (_t(4, 1), _r(2, 1)))
    return a, b, c


MMA_ROWS: dict[str, MmaRow] = {}


def _add(shape: tuple[int, int, int], a: str, b: str, c: str, min_arch: int) -> None:
    m, n, k = shape
    da, db, dc = dtype(a), dtype(b), dtype(c)
    frags = _m16n8(k, da.bits) if m == 16 else _m8n8(k, max(1, 32 // da.bits))
    pa, pb, pc = PTX_TYPES[a], PTX_TYPES[b], PTX_TYPES[c]
    name = f"mma.m{m}n{n}k{k}.{pa}.{pb}.{pc}"
    ptx = f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{pc}.{pa}.{pb}.{pc}"
    MMA_ROWS[name] = MmaRow(name, shape, da, db, dc, *frags, ptx, min_arch)


# Longest k first: fewer instructions for the same GEMM.
for _c in ("float32", "float16"):
    _add((16, 8, 16), "float16", "float16", _c, 80)
    _add((16, 8, 8), "float16", "float16", _c, 75)
_add((16, 8, 16), "bfloat16", "bfloat16", "float32", 80)
_add((16, 8, 8), "bfloat16", "bfloat16", "float32", 80)
_add((16, 8, 8), "tfloat32", "tfloat32", "float32", 80)
_add((16, 8, 4), "tfloat32", "tfloat32", "float32", 80)
for _a in ("int8", "uint8"):
    for _b in ("int8", "uint8"):
        _add((16, 8, 32), _a, _b, "int32", 80)
        _add((16, 8, 16), _a, _b, "int32", 80)
        _add((8, 8, 16), _a, _b, "int32", 75)
for _a in ("float8_e4m3", "float8_e5m2"):
    for _b in ("float8_e4m3", "float8_e5m2"):
        _add((16, 8, 32), _a, _b, "float32", 89)
_add((8, 8, 4), "float64", "float64", "float64", 80)


def operand_dtype(dt: Any) -> dtype:
    """The operand type of the table for an element type: tf32 for float32, e4m3 for e4m3fn."""
    dt = dtype(dt)
    return dtype("tfloat32") if dt == "float32" else dtype(_ALIASES.get(str(dt), dt))


def mma_rows(arch_number: int, a_dtype: Any, b_dtype: Any, c_dtype: Any) -> tuple[MmaRow, ...]:
    """Rows for operands and accumulator of these element types on sm_<arch_number>, longest k first; () when none."""
    a, b, c = operand_dtype(a_dtype), operand_dtype(b_dtype), dtype(c_dtype)
    return tuple(r for r in MMA_ROWS.values()
                 if r.a_dtype == a and r.b_dtype == b and r.c_dtype == c and r.min_arch <= arch_number)
