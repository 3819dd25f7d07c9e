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

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import dtype, numpy_dtype
from tilelang.ir.dtype import SCALE
from tilelang.ir.numbers import to_dtype
from tilelang.target.cpu import unsupported

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


def splat(literal: str, ty: str) -> str:
    """A literal for ty, repeated over its lanes."""
    if ty[0] != "<":
        return literal
    return f"splat ({ty[ty.index('x') + 2:-1]} {literal})"


def float_literal(v: float, double: bool = False) -> str:
    """The LLVM text of a float constant (LLVM writes float constants as the double that equals them)."""
    if not double:
        with np.errstate(over="ignore"):
            v = float(np.float32(v))
    return f"0x{struct.unpack('<Q', struct.pack('<d', v))[0]:016X}"


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


def intrinsic(f: Fn, name: str, ty: str, *args: str, arg_tail: str = "") -> str:
    """Call an overloaded LLVM intrinsic whose operands all have type ty."""
    fn = f.module.declare(overloaded(name, ty), ty, ", ".join([ty] * len(args)) + (", i1" if arg_tail else ""))
    return f.let(f"call {ty} {fn}({', '.join(f'{ty} {a}' for a in args)}{', ' + arg_tail if arg_tail else ''})")


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
    mt, vt, n = memory_type(dt), value_type(dt), dt.lanes
    if dt.is_bool:
        return f.let(f"icmp ne {mt} {v}, {splat('0', mt)}")
    if dt.base == "float16":
        return f.let(f"fpext {mt} {v} to {vt}")
    if dt.base == "bfloat16":
        it = _lanes("i32", n)
        wide = f.let(f"zext {mt} {v} to {it}")
        high = f.let(f"shl {it} {wide}, {splat('16', it)}")
        return f.let(f"bitcast {it} {high} to {vt}")
    if dt.is_float8:
        return _decode8(f, dt, v)
    return v


def to_memory(f: Fn, dt: dtype, v: str) -> str:
    """The memory form of a register value (already a value of dt)."""
    mt, vt, n = memory_type(dt), value_type(dt), dt.lanes
    if dt.is_bool:
        return f.let(f"zext {vt} {v} to {mt}")
    if dt.base == "float16":
        return f.let(f"fptrunc {vt} {v} to {mt}")
    if dt.base == "bfloat16":
        it = _lanes("i32", n)
        bits = f.let(f"bitcast {vt} {v} to {it}")
        high = f.let(f"lshr {it} {bits}, {splat('16', it)}")
        return f.let(f"trunc {it} {high} to {mt}")
    if dt.is_float8:
        return _encode8(f, dt, v, saturate=False)
    return v


def rounded(f: Fn, dt: dtype, v: str) -> str:
    """A float32 register value rounded to nearest even in dt (unchanged for 32 and 64 bits)."""
    if dt.bits >= 32:
        return v
    vt, n = value_type(dt), dt.lanes
    if dt.base == "float16":
        half = _lanes("half", n)
        return f.let(f"fpext {half} {f.let(f'fptrunc {vt} {v} to {half}')} to {vt}")
    if dt.base == "bfloat16":
        it = _lanes("i32", n)
        bits = f.let(f"bitcast {vt} {v} to {it}")
        odd = f.let(f"and {it} {f.let(f'lshr {it} {bits}, ' + splat('16', it))}, {splat('1', it)}")
        up = f.let(f"add {it} {f.let(f'add {it} {bits}, ' + splat('32767', it))}, {odd}")
        cut = f.let(f"and {it} {up}, {splat('-65536', it)}")
        nan = f.let(f"fcmp uno {vt} {v}, {v}")
        keep = f.let(f"and {it} {f.let(f'or {it} {bits}, ' + splat('4194304', it))}, {splat('-65536', it)}")
        out = f.let(f"select {_lanes('i1', n)} {nan}, {it} {keep}, {it} {cut}")
        return f.let(f"bitcast {it} {out} to {vt}")
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
    it, bt = _lanes("i32", n), _lanes("i1", n)

    def k(x: int) -> str:
        return splat(str(x), it)

    bits = f.let(f"bitcast {vt} {v} to {it}")
    mag = f.let(f"and {it} {bits}, {k(0x7FFFFFFF)}")
    sign = f.let(f"and {it} {f.let(f'lshr {it} {bits}, {k(24)}')}, {k(0x80)}")
    # Normal results: drop 23 - mbits bits with round to even, then move the exponent bias.
    drop = 23 - mbits
    odd = f.let(f"and {it} {f.let(f'lshr {it} {mag}, {k(drop)}')}, {k(1)}")
    up = f.let(f"add {it} {f.let(f'add {it} {mag}, {k((1 << (drop - 1)) - 1)}')}, {odd}")
    normal = f.let(f"sub {it} {f.let(f'lshr {it} {up}, {k(drop)}')}, {k((127 - bias) << mbits)}")
    # Subnormal results: adding 2^(23 - position of the last bit) rounds there in the float unit itself.
    magic = float(2.0 ** (23 + 1 - bias - mbits))
    size = f.let(f"bitcast {it} {mag} to {vt}")
    moved = f.let(f"fadd {vt} {size}, {splat(float_literal(magic), vt)}")
    magic_bits = struct.unpack("<I", struct.pack("<f", magic))[0]
    small = f.let(f"sub {it} {f.let(f'bitcast {vt} {moved} to {it}')}, {k(magic_bits)}")
    is_small = f.let(f"icmp ult {it} {mag}, {k((128 - bias) << 23)}")
    code = f.let(f"select {bt} {is_small}, {it} {small}, {it} {normal}")
    top = 0x7F if fnuz else (((1 << ebits) - 1) << mbits) - 1 if has_inf else 0x7E
    infinite = f.let(f"icmp uge {it} {mag}, {k(0x7F800000)}")
    too_big = f.let(f"or {bt} {f.let(f'icmp sgt {it} {code}, {k(top)}')}, {infinite}")
    nan = f.let(f"fcmp uno {vt} {v}, {v}")
    nan_code = 0x80 if fnuz else 0x7F if not has_inf else 0x7E
    over = top if saturate or not has_inf else top + 1
    code = f.let(f"select {bt} {too_big}, {it} {k(over)}, {it} {code}")
    code = f.let(f"select {bt} {nan}, {it} {k(nan_code)}, {it} {code}")
    if fnuz:  # no negative zero: 0x80 is the NaN
        plain = f.let(f"icmp eq {it} {f.let(f'and {it} {code}, {k(0x7F)}')}, {k(0)}")
        signed = f.let(f"or {it} {code}, {sign}")
        code = f.let(f"select {bt} {plain}, {it} {code}, {it} {signed}")
    else:
        code = f.let(f"or {it} {code}, {sign}")
    return f.let(f"trunc {it} {code} to {_lanes('i8', n)}")


def _encode_scale(f: Fn, dt: dtype, v: str) -> str:
    """float32 to float8_e8m0fnu: the next power of two that |v| does not exceed, at most 2**127; NaN is 255."""
    n, vt = dt.lanes, value_type(dt)
    it, bt = _lanes("i32", n), _lanes("i1", n)
    size = f.let(f"and {it} {f.let(f'bitcast {vt} {v} to {it}')}, {splat(str(0x7FFFFFFF), it)}")
    up = f.let(f"lshr {it} {f.let(f'add {it} {size}, ' + splat(str(0x7FFFFF), it))}, {splat('23', it)}")
    code = intrinsic(f, "llvm.umin", it, up, splat("254", it))
    least = f.let(f"icmp ule {it} {size}, {splat(str(0x400000), it)}")
    code = f.let(f"select {bt} {least}, {it} {splat('0', it)}, {it} {code}")
    nan = f.let(f"fcmp uno {vt} {v}, {v}")
    code = f.let(f"select {bt} {nan}, {it} {splat('255', it)}, {it} {code}")
    return f.let(f"trunc {it} {code} to {_lanes('i8', n)}")


# ---- conversions between dtypes --------------------------------------------------------------------------------------


def convert(f: Fn, v: str, src: dtype, dst: dtype) -> str:
    """Cast a register value: float to int truncates, to a narrower float rounds to nearest even."""
    if src == dst:
        return v
    st, dt = value_type(src), value_type(dst)
    if dst.is_bool:
        if src.is_float:
            return f.let(f"fcmp une {st} {v}, {splat(float_literal(0.0), st)}")
        return f.let(f"icmp ne {st} {v}, {splat('null' if src.is_handle else '0', st)}")
    if src.is_handle or dst.is_handle:
        if src.is_handle and dst.is_handle:
            return v
        if src.is_handle:
            return convert(f, f.let(f"ptrtoint ptr {v} to i64"), dtype("int64"), dst)
        return f.let(f"inttoptr i64 {convert(f, v, src, dtype('int64'))} to ptr")
    if dst.is_float:
        return _float_to_float(f, v, src, dst) if src.is_float else _int_to_float(f, v, src, dst)
    if src.is_float:
        # Values out of range become the nearest end of the range; NaN becomes zero.
        name = f"llvm.fpto{'u' if dst.is_unsigned else 's'}i.sat"
        fn = f.module.declare(f"{overloaded(name, dt)}{overloaded('', st)}", dt, st)
        return f.let(f"call {dt} {fn}({st} {v})")
    if src.is_bool:
        return f.let(f"zext {st} {v} to {dt}")
    if src.bits == dst.bits:
        return v
    op = "trunc" if dst.bits < src.bits else "zext" if src.is_unsigned else "sext"
    return f.let(f"{op} {st} {v} to {dt}")


def _int_to_float(f: Fn, v: str, src: dtype, dst: dtype) -> str:
    """An integer rounded once to a float, also where float32 would round it before."""
    st, dt = value_type(src), value_type(dst)
    op = "uitofp" if src.is_unsigned or src.is_bool else "sitofp"
    if dst.base == "float16" and src.bits > 16:
        # 65520 is the least value that rounds to infinity. LLVM 22 assumes that an integer with few significant bits (a byte
        # shifted left) fits in float16, however large it is, and omits the rounding, so larger values must not occur.
        v = intrinsic(f, "llvm.umin" if src.is_unsigned else "llvm.smin", st, v, splat("65520", st))
        v = v if src.is_unsigned else intrinsic(f, "llvm.smax", st, v, splat("-65520", st))
    if dst.bits >= 32 or src.bits <= 16 or dst.base == "float16":  # values that float32 would round are infinite in float16
        return rounded(f, dst, f.let(f"{op} {st} {v} to {dt}"))
    double = dtype("float64").with_lanes(src.lanes)
    wide = value_type(double)
    if src.bits == 64:  # beyond 53 bits the low bits only tell whether the value is exact; bit 12 stands for them
        bt = _lanes("i1", src.lanes)
        low = f.let(f"and {st} {v}, {splat('4095', st)}")
        some = f.let(f"icmp ne {st} {low}, {splat('0', st)}")
        sticky = f.let(f"select {bt} {some}, {st} {splat('4096', st)}, {st} {splat('0', st)}")
        cut = f.let(f"or {st} {f.let(f'sub {st} {v}, {low}')}, {sticky}")
        size = v if src.is_unsigned else intrinsic(f, "llvm.abs", st, v, arg_tail="i1 false")
        exact = f.let(f"icmp ult {st} {size}, {splat(str(1 << 53), st)}")
        v = f.let(f"select {bt} {exact}, {st} {v}, {st} {cut}")
    return _float_to_float(f, f.let(f"{op} {st} {v} to {wide}"), double, dst)


def _float_to_float(f: Fn, v: str, src: dtype, dst: dtype) -> str:
    st, dt = value_type(src), value_type(dst)
    if src.bits < 64 and dst.bits < 64:
        if dst.bits >= 32 or src.base == dst.base:
            return v
        return rounded(f, dst, v)
    if src.bits < 64:
        return f.let(f"fpext {st} {v} to {dt}")
    near = f.let(f"fptrunc {st} {v} to {dt}")
    if dst.bits >= 32:
        return near
    # Two roundings would be wrong in rare cases, so the value is first rounded to odd in float32 (towards zero, last bit
    # sticky).
    n = src.lanes
    it, bt = _lanes("i32", n), _lanes("i1", n)
    back = f.let(f"fpext {dt} {near} to {st}")
    inexact = f.let(f"fcmp one {st} {back}, {v}")
    bigger = f.let(f"fcmp ogt {st} {intrinsic(f, 'llvm.fabs', st, back)}, {intrinsic(f, 'llvm.fabs', st, v)}")
    bits = f.let(f"bitcast {dt} {near} to {it}")
    down = f.let(f"sub {it} {bits}, {f.let(f'zext {bt} {bigger} to {it}')}")
    odd = f.let(f"or {it} {down}, {f.let(f'zext {bt} {inexact} to {it}')}")
    return rounded(f, dst, f.let(f"bitcast {it} {odd} to {dt}"))
