"""Table of the MMA instructions of a warp (mma.sync): operand layouts, PTX name and NumPy definition; rows of any target.

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

from tilelang.ir import dtype
from tilelang.layout import Fragment, Mode

from .mfma import MFMA_ROWS
from .mma_row import MmaRow, register as _r, thread as _t

PTX_TYPES = {"float16": "f16", "bfloat16": "bf16", "tfloat32": "tf32", "float32": "f32", "float64": "f64", "int8": "s8",
             "uint8": "u8", "int32": "s32", "float8_e4m3": "e4m3", "float8_e5m2": "e5m2"}
_ALIASES = {"float8_e4m3fn": "float8_e4m3"}


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


def plain_dtype(dt: Any) -> dtype:
    """The name in the table of an element type: e4m3 for e4m3fn."""
    return dtype(_ALIASES.get(str(dtype(dt)), dtype(dt)))


def operand_dtype(dt: Any) -> dtype:
    """The operand type of NVIDIA's instructions for an element type: tf32 for float32, e4m3 for e4m3fn."""
    return dtype("tfloat32") if dtype(dt) == "float32" else plain_dtype(dt)


def mma_rows(target: Any, a_dtype: Any, b_dtype: Any, c_dtype: Any) -> tuple[MmaRow, ...]:
    """Rows for operands and accumulator of these element types on a Target, the preferred first; () when none.

    float32 operands are rounded to tf32 where rows have only that, and tf32 is multiplied as float32 where they have only that.
    """
    c = dtype(c_dtype)
    rows = [r for r in (*MMA_ROWS.values(), *MFMA_ROWS.values()) if r.c_dtype == c and r.on(target)]
    plain = plain_dtype(a_dtype), plain_dtype(b_dtype)
    for types in (plain, *((new, new) for old, new in (("float32", "tfloat32"), ("tfloat32", "float32")) if old in plain)):
        found = tuple(r for r in rows if (r.a_dtype, r.b_dtype) == types)
        if found:
            return found
    return ()


def machines_with(target: Any, a_dtype: Any, b_dtype: Any, c_dtype: Any) -> list[str]:
    """The architectures of the target's maker that multiply operands and accumulator of these element types: "sm_89"."""
    types = plain_dtype(a_dtype), plain_dtype(b_dtype), dtype(c_dtype)
    table = MMA_ROWS if target.chip is None else MFMA_ROWS
    rows = [r for r in table.values() if (r.a_dtype, r.b_dtype, r.c_dtype) == types]
    least = min((r.min_arch for r in rows), default=0)
    return sorted({chip for r in rows for chip, _ in r.chips}) or [f"sm_{least}"] * bool(rows)


def row(name: str) -> MmaRow | None:
    """The instruction of this name; None when there is none."""
    return MMA_ROWS.get(name) or MFMA_ROWS.get(name)
