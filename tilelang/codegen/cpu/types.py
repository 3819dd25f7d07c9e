"""Element types in LLVM: how they lie in memory, what they are in registers, and the conversions between.

    dtype            memory   register        dtype            memory   register
    bool             i8       i1              float16          half     float
    int8 … uint64    iN       iN              bfloat16         i16      float
    float32          float    float           float8_*         i8       float
    float64          double   double          handle           ptr      ptr

16- and 8-bit floats live in registers as the float32 that equals them; `rounded` brings a float32 result back to such a
value, so each operation is "computed in float32 and rounded".  All functions take `lanes` from the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import dtype, numpy_dtype
from tilelang.ir.dtype import SCALE
from tilelang.ir.numbers import to_dtype
from tilelang.target.cpu import unsupported
from tilelang.target.llvm_values import Value, float_literal, operand_text, splat

from .text import Fn

_FLOAT8 = {  # name: (exponent bits, mantissa bits, bias, has infinities, "fnuz" single NaN at 0x80)
    "float8_e4m3": (4, 3, 7, False, False), "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False), "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}


def _lanes(scalar: str, n: int) -> str:
    return scalar if n == 1 else f"<{n} x {scalar}>"


def memory_scalar(dt: dtype, span: Any = None) -> str:
    """The LLVM type of one element in memory."""
    base = dt.base
    if base in ("float32", "tfloat32"):
        return "float"
    if base == "float16":
        return "half"
    if base == "float64":
        return "double"
    if base == "bfloat16":
        return "i16"
    if base == "bool" or base in _FLOAT8 or base == SCALE:
        return "i8"
    if dt.is_handle:
        return "ptr"
    if dt.is_int and dt.bits >= 8:
        return f"i{dt.bits}"
    raise unsupported(f"elements of type {dt}", span=span, hint="use a type of at least 8 bits and convert by hand")


def memory_type(dt: dtype, span: Any = None) -> str:
    """The LLVM type of an element (or vector of elements) in memory."""
    return _lanes(memory_scalar(dt, span), dt.lanes)


def value_type(dt: dtype, span: Any = None) -> str:
    """The LLVM type of a value in registers."""
    if dt.is_bool:
        return _lanes("i1", dt.lanes)
    if dt.is_float:
        memory_scalar(dt, span)
        return _lanes("double" if dt.bits == 64 else "float", dt.lanes)
    return memory_type(dt, span)


def literal(value: Any, dt: dtype) -> str:
    """The operand text of a constant of dt (a scalar literal, or a splat)."""
    ty = value_type(dt)
    if dt.is_bool:
        return splat("true" if value else "false", ty)
    if dt.is_float:
        if dt.bits < 32 and not (dt.base == "float8_e5m2" and np.isinf(value)):  # its infinities are no conversions
            with np.errstate(all="ignore"):
                value = float(to_dtype(np.asarray(value, np.float64), dt).astype(np.float64))
        return splat(float_literal(float(value), dt.bits == 64), ty)
    if dt.is_handle:
        return f"inttoptr (i64 {int(value)} to ptr)" if value else "null"
    return splat(str(int(value)), ty)


def overloaded(name: str, ty: str) -> str:
    """The name of an overloaded LLVM intrinsic for a type: llvm.fma + <8 x float> -> llvm.fma.v8f32."""
    short = {"float": "f32", "double": "f64", "half": "f16"}
    if ty[0] == "<":
        n, _, scalar = ty[1:-1].split(" ")
        return f"{name}.v{n}{short.get(scalar, scalar)}"
    return f"{name}.{short.get(ty, ty)}"


def intrinsic(f: Fn, name: str, ty: str, *args: Any, arg_tail: str = "") -> Value:
    """Call an overloaded LLVM intrinsic whose operands all have type ty."""
    fn = f.module.declare(overloaded(name, ty), ty, ", ".join([ty] * len(args)) + (", i1" if arg_tail else ""))
    given = ", ".join(f"{ty} {operand_text(a, ty)}" for a in args)
    return f.of(ty, f.let(f"call {ty} {fn}({given}{', ' + arg_tail if arg_tail else ''})"))


# ---- memory <-> register ------------------------------------------------------------------------------------------


def load(f: Fn, dt: dtype, address: str, span: Any = None, align: int = 0) -> str:
    """Read an element (or a vector of adjacent elements) and convert it to register form."""
    mt = memory_type(dt, span)
    v = f.let(f"load {mt}, ptr {address}, align {align or _element_bytes(dt)}")
    return from_memory(f, dt, v)


def store(f: Fn, dt: dtype, value: str, address: str, span: Any = None, align: int = 0) -> None:
    """Write a register value as an element (or a vector of adjacent elements)."""
    mt = memory_type(dt, span)
    f.do(f"store {mt} {to_memory(f, dt, value)}, ptr {address}, align {align or _element_bytes(dt)}")


def _element_bytes(dt: dtype) -> int:
    return dt.scalar.bytes


def from_memory(f: Fn, dt: dtype, v: str) -> str:
    """The register form of a value from memory."""
    x, vt = f.of(memory_type(dt), v), value_type(dt)
    if dt.is_bool:
        return x.test("ne", 0)
    if dt.base == "float16":
        return x.to("fpext", vt)
    if dt.base == "bfloat16":
        return (x.to("zext", _lanes("i32", dt.lanes)) << 16).to("bitcast", vt)
    return _decode8(f, dt, v) if dt.is_float8 else v


def to_memory(f: Fn, dt: dtype, v: str) -> str:
    """The memory form of a register value (already a value of dt)."""
    x, mt = f.of(value_type(dt), v), memory_type(dt)
    if dt.is_bool:
        return x.to("zext", mt)
    if dt.base == "float16":
        return x.to("fptrunc", mt)
    if dt.base == "bfloat16":
        return (x.to("bitcast", _lanes("i32", dt.lanes)) >> 16).to("trunc", mt)
    return _encode8(f, dt, v, saturate=False) if dt.is_float8 else v


def rounded(f: Fn, dt: dtype, v: str) -> str:
    """A float32 register value rounded to nearest even in dt (unchanged for 32 and 64 bits)."""
    if dt.bits >= 32:
        return v
    vt, it, x = value_type(dt), _lanes("i32", dt.lanes), f.of(value_type(dt), v)
    if dt.base == "float16":
        return x.to("fptrunc", _lanes("half", dt.lanes)).to("fpext", vt)
    if dt.base == "bfloat16":
        bits = x.to("bitcast", it)
        odd = bits >> 16 & 1
        cut = bits + 32767 + odd & -65536
        return x.is_nan().select((bits | 4194304) & -65536, cut).to("bitcast", vt)
    return _decode8(f, dt, _encode8(f, dt, v))


def _decode8(f: Fn, dt: dtype, v: str) -> str:
    """float8 to float32 by a table of its 256 values."""
    base = dt.base

    def table() -> str:
        with np.errstate(all="ignore"):
            values = np.arange(256, dtype=np.uint8).view(numpy_dtype(base)).astype(np.float32)
        nan = ("float 0x7FF8000000000000", "float 0xFFF8000000000000")
        body = ", ".join(f"float {float_literal(float(x))}" if x == x else nan[int(np.signbit(x))] for x in values)
        return f"@{base}_values = private unnamed_addr constant [256 x float] [{body}], align 64"

    f.module.need(f"{base}_values", table)

    def one(x: str) -> str:
        at = f.let(f"getelementptr inbounds float, ptr @{base}_values, i64 {f.let(f'zext i8 {x} to i64')}")
        return f.let(f"load float, ptr {at}, align 4")

    return per_lane(f, dt.lanes, "i8", "float", [v], one)


def per_lane(f: Fn, lanes: int, source: str, result: str, args: list[str], one: Callable[..., str]) -> str:
    """one(scalar operands) -> scalar operand, applied to each lane.  source, result: types of a lane."""
    if lanes == 1:
        return one(*args)
    out, ty = "poison", f"<{lanes} x {result}>"
    for i in range(lanes):
        xs = [f.let(f"extractelement <{lanes} x {source}> {a}, i64 {i}") for a in args]
        out = f.let(f"insertelement {ty} {out}, {result} {one(*xs)}, i64 {i}")
    return out


def _encode8(f: Fn, dt: dtype, v: str, saturate: bool = True) -> str:
    """float32 to float8, rounded to nearest even. Values beyond the largest number, infinities included, become that number.

    saturate: False for values of the type, whose infinities stay.
    """
    if dt.base == SCALE:
        return _encode_scale(f, dt, v)
    ebits, mbits, bias, has_inf, fnuz = _FLOAT8[dt.base]
    n, vt = dt.lanes, value_type(dt)
    it, x = _lanes("i32", n), f.of(vt, v)
    bits = x.to("bitcast", it)
    mag = bits & 0x7FFFFFFF
    sign = bits >> 24 & 0x80
    # Normal results: drop 23 - mbits bits with round to even, then move the exponent bias.
    drop = 23 - mbits
    odd = mag >> drop & 1
    normal = (mag + ((1 << drop - 1) - 1) + odd >> drop) - ((127 - bias) << mbits)
    # Subnormal results: adding 2^(23 - position of the last bit) rounds there in the float unit itself.
    magic = float(2.0 ** (23 + 1 - bias - mbits))
    small = (mag.to("bitcast", vt) + magic).to("bitcast", it) - int(np.float32(magic).view(np.int32))
    code = mag.test("ult", (128 - bias) << 23).select(small, normal)
    top = 0x7F if fnuz else (((1 << ebits) - 1) << mbits) - 1 if has_inf else 0x7E
    infinite = mag.test("uge", 0x7F800000)
    too_big = code.test("sgt", top) | infinite
    nan = x.is_nan()
    code = nan.select(0x80 if fnuz else 0x7F if not has_inf else 0x7E,
                      too_big.select(top if saturate or not has_inf else top + 1, code))
    if fnuz:  # no negative zero: 0x80 is the NaN
        plain = (code & 0x7F).test("eq", 0)
        return plain.select(code, code | sign).to("trunc", _lanes("i8", n))
    return (code | sign).to("trunc", _lanes("i8", n))


def _encode_scale(f: Fn, dt: dtype, v: str) -> str:
    """float32 to float8_e8m0fnu: the next power of two that |v| does not exceed, at most 2**127; NaN is 255."""
    x, it = f.of(value_type(dt), v), _lanes("i32", dt.lanes)
    size = x.to("bitcast", it) & 0x7FFFFFFF
    code = intrinsic(f, "llvm.umin", it, size + 0x7FFFFF >> 23, 254)
    code = size.test("ule", 0x400000).select(0, code)
    return x.is_nan().select(255, code).to("trunc", _lanes("i8", dt.lanes))


# ---- conversions between dtypes --------------------------------------------------------------------------------------


def convert(f: Fn, v: str, src: dtype, dst: dtype) -> str:
    """Cast a register value: float to int truncates, to a narrower float rounds to nearest even."""
    if src == dst:
        return v
    st, dt = value_type(src), value_type(dst)
    x = f.of(st, v)
    if dst.is_bool:
        return x.test("une", 0.0) if src.is_float else x.test("ne", "null" if src.is_handle else 0)
    if src.is_handle or dst.is_handle:
        if src.is_handle and dst.is_handle:
            return v
        if src.is_handle:
            return convert(f, x.to("ptrtoint", "i64"), dtype("int64"), dst)
        return f.let(f"inttoptr i64 {convert(f, v, src, dtype('int64'))} to ptr")
    if dst.is_float:
        return _float_to_float(f, x, src, dst) if src.is_float else _int_to_float(f, x, src, dst)
    if src.is_float:
        # Values out of range become the nearest end of the range; NaN becomes zero.
        name = f"llvm.fpto{'u' if dst.is_unsigned else 's'}i.sat"
        fn = f.module.declare(f"{overloaded(name, dt)}{overloaded('', st)}", dt, st)
        return f.let(f"call {dt} {fn}({st} {v})")
    if src.is_bool:
        return x.to("zext", dt)
    return v if src.bits == dst.bits else x.to("trunc" if dst.bits < src.bits else "zext" if src.is_unsigned else "sext", dt)


def _int_to_float(f: Fn, x: Value, src: dtype, dst: dtype) -> str:
    """An integer rounded once to a float, also where float32 would round it before."""
    st, op = x.ty, "uitofp" if src.is_unsigned or src.is_bool else "sitofp"
    if dst.base == "float16" and src.bits > 16:
        # 65520 is the least value that rounds to infinity. LLVM 22 assumes that an integer with few significant bits (a byte
        # shifted left) fits in float16, however large it is, and omits the rounding, so larger values must not occur.
        x = intrinsic(f, "llvm.umin" if src.is_unsigned else "llvm.smin", st, x, 65520)
        x = x if src.is_unsigned else intrinsic(f, "llvm.smax", st, x, -65520)
    if dst.bits >= 32 or src.bits <= 16 or dst.base == "float16":  # values that float32 would round are infinite in float16
        return rounded(f, dst, x.to(op, value_type(dst)))
    double = dtype("float64").with_lanes(src.lanes)
    if src.bits == 64:  # beyond 53 bits the low bits only tell whether the value is exact; bit 12 stands for them
        low = x & 4095
        sticky = low.test("ne", 0).select(4096, 0, st)
        cut = x - low | sticky
        size = x if src.is_unsigned else intrinsic(f, "llvm.abs", st, x, arg_tail="i1 false")
        x = size.test("ult", 1 << 53).select(x, cut)
    return _float_to_float(f, x.to(op, value_type(double)), double, dst)


def _float_to_float(f: Fn, x: Value, src: dtype, dst: dtype) -> str:
    st, dt = x.ty, value_type(dst)
    if src.bits < 64 and dst.bits < 64:
        return x if dst.bits >= 32 or src.base == dst.base else rounded(f, dst, x)
    if src.bits < 64:
        return x.to("fpext", dt)
    near = x.to("fptrunc", dt)
    if dst.bits >= 32:
        return near
    # Two roundings would be wrong in rare cases, so the value is first rounded to odd in float32 (towards zero, last bit
    # sticky).
    it = _lanes("i32", src.lanes)
    back = near.to("fpext", st)
    inexact = back.test("one", x)
    bigger = intrinsic(f, "llvm.fabs", st, back).test("ogt", intrinsic(f, "llvm.fabs", st, x))
    odd = near.to("bitcast", it) - bigger.to("zext", it) | inexact.to("zext", it)
    return rounded(f, dst, odd.to("bitcast", dt))
