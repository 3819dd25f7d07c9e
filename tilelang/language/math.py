"""Scalar math: the intrinsics of target/intrinsics.py by name, and functions composed of operators.

T.cast with a rounding mode, and to 8-bit floats without saturation.
"""

from __future__ import annotations

import math as _math
from collections.abc import Callable
from typing import Any

from tilelang.ir import (BOOL, F32, I32, Broadcast, Buffer, Const, Expr, Ramp, Select, Shuffle, StringConst, as_bool, binary,
                         call, cast, const, convert, dtype as DType, int_range, is_const, logical, match, numpy_dtype, select,
                         unary)
from tilelang.ir.dtype import float_max, float_min
from tilelang.target.accuracy import FAST, stated
from tilelang.target.conversions import F64, INTO_INTEGERS, UNSATURATED, towards, unsaturated

from .tensor import dtype_of
from .tracing.python_questions import differs
from .tracing.regions import BufferSlice
from .tracing.state import describe, error, example, named


def converted(e: Expr, dt: DType, mode: str, sat: bool) -> Expr:
    """e in type dt, rounded to nearest (rn, ""), towards 0 (rz), up (rp) or down (rm).

    Raises cast-option for a rounding mode that a type does not support (below 8 bits, float8_e8m0fnu, integers of 64
    bits), and for sat=False where a type has neither infinity nor NaN.
    """
    if not dt.is_float:
        inside = INTO_INTEGERS.get(mode) if e.dtype.is_float else None
        return cast(call(inside, (e,), e.dtype) if inside else e, dt)
    if not sat and dt.bits <= 8 and dt.base not in UNSATURATED:
        raise error("cast-option", f"T.cast to {dt} with ‹sat=False›: the type has no number beyond its greatest",
                    expected="sat=True")
    if e.dtype.scalar == dt.scalar or mode in ("", "rn") and (sat or dt.base not in UNSATURATED):
        return cast(e, dt)
    if e.dtype.is_int and e.dtype.bits <= 32 or e.dtype.is_bool:
        e = cast(e, F64.with_lanes(e.dtype.lanes))
    if not e.dtype.is_float or dt.bits < 8 or dt.base == "float8_e8m0fnu":
        raise error("cast-option", f"T.cast of ‹{e.dtype} to {dt}› with round={mode!r} is not available",
                    expected="a float or an integer of at most 32 bits, to a float with a sign of at least 8")
    near = cast(e, dt) if mode in ("", "rn") else towards(e, dt, mode)
    return near if sat or dt.base not in UNSATURATED else unsaturated(e, near, mode)


MOST_FACTORS = 32  # greatest exponent that T.pow expands to multiplications

def value_of(x: Any) -> Expr:
    """An operand as an expression; slices are vectors."""
    if isinstance(x, str):
        raise error("math-type", f"the string ‹{x!r}› is no operand", "write a number or an expression")
    return convert(x.vector() if isinstance(x, BufferSlice) else x)


def _float_arg(x: Any, name: str, strict: bool) -> Expr:
    """The argument as a float expression.  Integers become float32, or are rejected when strict."""
    e = value_of(x)
    if e.dtype.is_float:
        return e
    if strict and not isinstance(x, (int, float)):
        raise error("math-type", f"T.{name} only supports floating-point inputs, but got ‹{e.dtype}›", expected="a float")
    return cast(e, F32.with_lanes(e.dtype.lanes))


def float_function(name: str, strict: bool = False) -> Callable[..., Expr]:
    """The function of the language that calls an intrinsic of one float.  strict: integers are not accepted."""
    def fn(x: Any, *, dtype: Any = None) -> Expr:
        e = _float_arg(x, name, strict)
        return call(name, (e,), e.dtype)

    whole = "integers are not accepted" if strict else "integers: float32"
    return named(fn, name, f"{name}(x), in the type of x ({whole}).  {_accuracy(name)}\n\nExample:\n    Y[i] = T.{name}(X[i])")


def _accuracy(name: str) -> str:
    return FAST[name].stated() if name in FAST else stated(name)


exp, exp2, exp10 = (float_function(n) for n in ("exp", "exp2", "exp10"))
log, log2, log10, log1p = (float_function(n) for n in ("log", "log2", "log10", "log1p"))
sqrt, rsqrt, sigmoid, sin, cos = (float_function(n) for n in ("sqrt", "rsqrt", "sigmoid", "sin", "cos"))
tan, sinh, cosh, tanh = (float_function(n, True) for n in ("tan", "sinh", "cosh", "tanh"))
asin, acos, atan = (float_function(n, True) for n in ("asin", "acos", "atan"))
asinh, acosh, atanh, erf = (float_function(n, True) for n in ("asinh", "acosh", "atanh", "erf"))


def _rounding(name: str) -> Callable[..., Expr]:
    def fn(x: Any, *, dtype: Any = None) -> Expr:
        e = value_of(x)
        return e if e.dtype.is_int else call(name, (e,), e.dtype)

    return named(fn, name,
                 f"{name}(x); integers are returned as they are.  {_accuracy(name)}\n\nExample:\n    Y[i] = T.{name}(X[i])")


floor, ceil, trunc, nearbyint = (_rounding(n) for n in ("floor", "ceil", "trunc", "nearbyint"))


@example("Y[i] = T.round(X[i])")
def round(x: Any, rounding_mode: str = "ties-to-even") -> Expr:
    """Nearest integer value; rounding_mode ties-to-even or ties-away-from-zero.  Exact."""
    e = value_of(x)
    rows = {"ties-to-even": "nearbyint", "ties-away-from-zero": "round"}
    if rounding_mode not in rows:
        raise error("rounding-mode", f"T.round: unknown rounding mode ‹{rounding_mode!r}›, expected one of {list(rows)}",
                    expected=f"one of {', '.join(rows)}")
    return e if e.dtype.is_int else call(rows[rounding_mode], (e,), e.dtype)


@example("Y[i] = T.abs(X[i])")
def abs(x: Any, *, dtype: Any = None) -> Expr:
    """Absolute value, in the type of x.  Exact."""
    e = value_of(x)
    if e.dtype.is_unsigned or e.dtype.is_bool:
        return e
    if isinstance(e, Const) and (e.dtype.is_float or e.value != int_range(e.dtype)[0]):
        return const(-e.value if e.value < 0 else e.value, e.dtype)
    return call("fabs" if e.dtype.is_float else "abs", (e,), e.dtype)


fabs = abs


def _integer(name: str, result: DType | None = None) -> Callable[..., Expr]:
    def fn(x: Any) -> Expr:
        e = value_of(x)
        if not e.dtype.is_int:
            raise error("math-type", f"T.{name} needs «an integer», found {e.dtype}")
        return call(name, (e,), result.with_lanes(e.dtype.lanes) if result else e.dtype)

    return named(fn, name, f"{name} of an integer.\n\nExample:\n    I[i] = T.{name}(I[i])")


popcount, clz = _integer("popcount"), _integer("clz")
__ffs = _integer("__ffs", I32)


@example("I[i] = T.__fns(I[i], 0, 1)")
def __fns(mask: Any, base: Any, offset: Any) -> Expr:
    """Position of the offset-th set bit of a 32-bit mask from base."""
    for name, given in (("mask", mask), ("base", base), ("offset", offset)):
        dt = value_of(given).dtype
        if not dt.is_int:
            raise error("math-type", f"T.__fns: the {name} is «an integer», found {dt}")
    return call("__fns", (cast(mask, "uint32"), cast(base, "uint32"), cast(offset, I32)), "uint32")


def _binary_float(name: str) -> Callable[..., Expr]:
    def fn(a: Any, b: Any) -> Expr:
        x, y = match(value_of(a), value_of(b))
        if not x.dtype.is_float:
            x, y = cast(x, F32.with_lanes(x.dtype.lanes)), cast(y, F32.with_lanes(y.dtype.lanes))
        return call(name, (x, y), x.dtype)

    return named(fn, name,
                 f"{name}(a, b), in their promoted float type.  {_accuracy(name)}\n\nExample:\n    Y[i] = T.{name}(X[i], Y[i])")


atan2, fmod, hypot = _binary_float("atan2"), _binary_float("fmod"), _binary_float("hypot")
copysign = _binary_float("copysign")


@example("Y[i] = T.nextafter(X[i], 0.0)")
def nextafter(a: Any, b: Any) -> Expr:
    """The neighbour of a towards b, in their promoted float type (float32 for integers).  Exact."""
    x, y = match(value_of(a), value_of(b))
    if not x.dtype.is_float:
        x, y = cast(x, F32.with_lanes(x.dtype.lanes)), cast(y, F32.with_lanes(y.dtype.lanes))
    dt = x.dtype
    if dt.bits >= 32:
        return call("nextafter", (x, y), dt)
    import ml_dtypes  # 5 ms: here, because importing the language should not load it

    # Other functions of narrow floats are computed in float32 and rounded.  Here that would round back to a.
    code = DType(f"int{dt.bits}").with_lanes(dt.lanes)
    wx, wy = (cast(v, F32.with_lanes(dt.lanes)) for v in (x, y))
    step = select(binary("eq", wx < wy, wx > 0.0), const(1, code.scalar), const(-1, code.scalar))
    near: Expr = call("reinterpret", (binary("add", call("reinterpret", (x,), code), step),), dt)
    least = const(float(ml_dtypes.finfo(numpy_dtype(dt)).smallest_subnormal), dt.scalar)
    if dt.base.endswith("fnuz"):  # in these types the code of negative zero is a NaN
        near = select(isnan(near), const(0.0, dt.scalar), near)
    near = select(binary("eq", wx, 0.0), copysign(least, y), near)
    out = select(binary("eq", wx, wy), y, near)
    return select(logical("or", isnan(x), isnan(y)), x + y, out)


@example("Y[i] = T.pow(X[i], 2)")
def pow(x: Any, y: Any) -> Expr:
    """x to the power y; a Python int y from 0 to 32 multiplies repeatedly, rounding each time.

    Integers take powers up to 64, wrapping around.  Raises math-type beyond.
    {accuracy}
    """
    e = value_of(x)
    if isinstance(y, int) and not isinstance(y, bool) and y > MOST_FACTORS:
        if not e.dtype.is_float and y > 2 * MOST_FACTORS:
            raise error("math-type", f"T.pow of {e.dtype} multiplies ‹{y}› times, expected at most {2 * MOST_FACTORS}",
                        expected=f"a power up to {2 * MOST_FACTORS}",
                        hint="multiply in a loop over a T.alloc_var, or cast to a float type")
        if e.dtype.is_float:
            return call("pow", (e, const(float(y), e.dtype)), e.dtype)
    if isinstance(y, int) and not isinstance(y, bool) and y >= 0:
        out: Expr | None = None
        base, n = e, y
        while n:
            if n & 1:
                out = base if out is None else out * base
            n >>= 1
            if n:
                base = base * base
        return const(1, e.dtype) if out is None else out
    a, b = match(e, value_of(y)) if not isinstance(y, float) or e.dtype.is_float else match(cast(e, F32), y)
    if not a.dtype.is_float:
        a, b = cast(a, F32), cast(b, F32)
    return call("pow", (a, b), a.dtype)


pow.__doc__ = (pow.__doc__ or "").format(accuracy=_accuracy("pow"))


@example("Y[i] = T.ldexp(X[i], 3)")
def ldexp(x: Any, n: Any) -> Expr:
    """x * 2**n.  Correctly rounded."""
    e = _float_arg(x, "ldexp", False)
    return call("ldexp", (e, cast(value_of(n), I32)), e.dtype)


def _predicate(name: str, on_int: bool) -> Callable[..., Expr]:
    def fn(x: Any) -> Expr:
        e = value_of(x)
        if isinstance(e, StringConst) or e.dtype.is_handle:
            raise error("math-type", f"T.{name} needs «a number», found {describe(x)}")
        if not e.dtype.is_float:
            return const(on_int)
        if e.dtype.bits < 32:
            e = cast(e, F32.with_lanes(e.dtype.lanes))  # exact, and keeps NaN and infinity
        return call(name, (e,), BOOL.with_lanes(e.dtype.lanes))

    return named(fn, name, f"{name}(x) as bool.\n\nExample:\n    if T.{name}(X[i]):\n        Y[i] = 0")


isnan, isinf, isfinite = _predicate("isnan", False), _predicate("isinf", False), _predicate("isfinite", True)


@example("if not T.isnullptr(p):", "    Y[i] = 1")
def isnullptr(p: Any) -> Expr:
    """Whether a pointer is null."""
    if isinstance(p, Buffer):
        p = p.data
    return call("isnullptr", (p,), BOOL)


@example("Y[i] = T.max(X[i], 0.0)")
def max(a: Any, b: Any) -> Expr:
    """The greater of two values, promoted to one type.  If one is NaN, the other."""
    return binary("max", _py(a), _py(b))


@example("Y[i] = T.min(X[i], 6.0)")
def min(a: Any, b: Any) -> Expr:
    """The lesser of two values, promoted to one type.  If one is NaN, the other."""
    return binary("min", _py(a), _py(b))


def _py(x: Any) -> Any:
    """An operand for promotion: slices become vectors, Python floats become float32 constants."""
    if isinstance(x, BufferSlice):
        return x.vector()
    return const(x) if isinstance(x, float) else x


@example("Y[i] = T.clamp(X[i], 0.0, 1.0)")
def clamp(x: Any, min_val: Any, max_val: Any) -> Expr:
    """min(max(x, min_val), max_val)."""
    return min(max(x, min_val), max_val)


# ---- casts and selection -------------------------------------------------------------------------------------------

@example('C[by, i] = T.cast(A[by, i], "float32")')
def cast_(value: Any, dtype: Any, round: str = "", sat: bool = True, rbits: Any = None) -> Expr:
    """Convert a value to another type.

    Float to integer truncates; values beyond the range become the nearest end of the range, and NaN becomes 0.  Conversion
    to a narrower float rounds once, to nearest even; 8-bit floats saturate (infinities too).  Integers keep their low bits.
    round: "rn" to nearest even (also into integers), "rz" towards 0, "rp" up, "rm" down.  sat=False: values beyond the range
    of an 8-bit float become infinity, or NaN where the type has none; for other types it has no effect.  Raises cast-option
    for unknown options, for "rs", and for conversions that a type does not support (see math.converted).
    """
    if isinstance(value, str) and not isinstance(dtype, str):
        value, dtype = dtype, value
    if round not in ("", "rn", "rz", "rp", "rm", "rs"):
        raise error("cast-option", f"Invalid round mode ‹{round!r}›, expected «'', rn, rz, rp, rm or rs»")
    if not isinstance(sat, bool):
        raise error("cast-option", f"sat must be «a bool», got {sat!r}")
    if (round == "rs") != (rbits is not None):
        raise error("cast-option", "rbits goes with round='rs', and only with it",
                    expected="rbits with round='rs', and only with it",
                    found=f"round={round!r} {'without' if rbits is None else 'with'} rbits")
    if round == "rs":
        raise error("cast-option", "T.cast with round=‹'rs'› is for Blackwell (sm_100), which is not available yet",
                    expected="'', rn, rz, rp or rm")
    dt = dtype_of(dtype, "T.cast")
    e = value_of(value)
    return converted(e, dt.with_lanes(e.dtype.lanes) if dt.lanes == 1 and e.dtype.lanes > 1 else dt, round, sat)


def Cast_(dtype: Any, value: Any) -> Expr:
    """T.Cast(dtype, value)."""
    return cast_(value, dtype)


@example('I[i] = T.reinterpret(X[i], "int32")')
def reinterpret(value: Any, dtype: Any) -> Expr:
    """The bits of value as another type of the same size; also (dtype, value)."""
    if isinstance(value, str) or isinstance(value, type):
        value, dtype = dtype, value
    e, dt = value_of(value), dtype_of(dtype, "T.reinterpret")
    if e.dtype.bits * e.dtype.lanes != dt.bits * dt.lanes:
        raise error("bit-size", f"T.reinterpret of {e.dtype} as {dt}: sizes differ",
                    expected=f"a type of {e.dtype.bits * e.dtype.lanes} bits", found=f"{dt}, {dt.bits * dt.lanes} bits")
    return e if e.dtype == dt else call("reinterpret", (e,), dt)


def Select_(cond: Any, a: Any, b: Any) -> Expr:
    """cond ? a : b, both evaluated; one type."""
    x, y = value_of(a), value_of(b)
    if x.dtype != y.dtype:
        raise error("select-types", f"T.Select: mismatched types ‹{x.dtype} and {y.dtype}›")
    c = as_bool(cond)
    return Select(c, x, y, x.dtype, False) if c.dtype.lanes == 1 else select(c, x, y, lazy=False)


@example("Y[i] = T.if_then_else(i < n, X[i], 0.0)")
def if_then_else(cond: Any, a: Any, b: Any) -> Expr:
    """cond ? a : b, promoted to one type.  Only the chosen side is evaluated, so cond may guard a load."""
    a, b = (v.vector() if isinstance(v, BufferSlice) else v for v in (a, b))
    return select(cond, a, b)


@example("Y[i] = T.where(X[i] > 0.0, X[i], 0.0)")
def where(condition: Any, a: Any, b: Any) -> Expr:
    """a where the condition holds, else b: T.if_then_else by the name that programs of whole tensors use."""
    return if_then_else(condition, a, b)


@example("indices = T.ramp(0, 2, 4)   # int32x4: 0, 2, 4, 6")
def Ramp_(base: Any, stride: Any, lanes: int) -> Ramp:
    """Vector base, base + stride, …"""
    x, y = match(convert(base), convert(stride))
    return Ramp(x, y, int(lanes), x.dtype.with_lanes(int(lanes)))


@example("v4 = T.broadcast(X[i], 4)   # float32x4")
def Broadcast_(value: Any, lanes: int) -> Expr:
    """Vector of copies of value."""
    e = value_of(value)
    return Broadcast(e, int(lanes), e.dtype.with_lanes(int(lanes)))


def Shuffle_(vectors: Any, indices: Any) -> Expr:
    """Lanes `indices` of the concatenated vectors, which have one element type.  Raises math-type, lane-range."""
    vs = tuple(value_of(v) for v in vectors)
    idx = tuple(int(i) for i in indices)
    types, lanes = ", ".join(str(v.dtype) for v in vs), sum(v.dtype.lanes for v in vs)
    if len({v.dtype.scalar for v in vs}) != 1 or not idx:
        raise error("math-type", f"T.Shuffle takes «lanes of vectors with one element type», found {len(idx)} lanes of {types}",
                    found=f"{len(idx)} lanes of {types or 'no vector'}")
    for i in idx:
        if not 0 <= i < lanes:
            raise error("lane-range", f"lane ‹{i}› of {types} does not exist", expected=f"a lane from 0 to {lanes - 1}")
    return Shuffle(vs, idx, vs[0].dtype.scalar.with_lanes(len(idx)))


@example("Y[i] = T.extract_lane(X[0:4], 1)")
def extract_lane(vec: Any, lane: Any) -> Expr:
    """One lane of a vector; lane is a compile-time integer."""
    if isinstance(vec, BufferSlice):
        vec = vec.vector()
    if not isinstance(vec, Expr):
        raise error("math-type", f"T.extract_lane needs «a vector expression», found {describe(vec)}")
    if isinstance(lane, Const):
        lane = lane.value
    if not isinstance(lane, int):
        raise error("math-type", "T.extract_lane needs «a constant lane»", found=describe(lane))
    if vec.dtype.lanes == 1:
        raise error("packed-type", f"T.extract_lane needs «a vector», found {vec.dtype}")
    if not 0 <= lane < vec.dtype.lanes:
        raise error("lane-range", f"lane ‹{lane}› of {vec.dtype} does not exist",
                    expected=f"a lane from 0 to {vec.dtype.lanes - 1}")
    return Shuffle((vec,), (lane,), vec.dtype.scalar)


# ---- constants of a type -------------------------------------------------------------------------------------------

def _limit(dt: Any, sign: int) -> Expr:
    d = dtype_of(dt, "T.max_value")
    if d.is_int or d.is_bool:
        low, high = int_range(d)
        return const(high if sign > 0 else low, d)
    return const(float_max(d.base) if sign > 0 else float_min(d.base), d)


@example('T.fill(acc, T.max_value("float32"))')
def max_value(dtype: Any) -> Expr:
    """Greatest finite value of a type."""
    return _limit(dtype, 1)


@example('T.fill(acc, T.min_value("float32"))')
def min_value(dtype: Any) -> Expr:
    """Least finite value of a type."""
    return _limit(dtype, -1)


@example('T.fill(acc, -T.infinity("float32"))')
def infinity(dtype: Any) -> Expr:
    """Positive infinity of a float type."""
    d = dtype_of(dtype, "T.infinity")
    if not d.is_float:
        raise error("math-type", f"T.infinity of ‹{d}›: only float types have it", expected="a float type",
                    hint="use T.max_value or T.min_value")
    return const(_math.inf, d)


# ---- integers ------------------------------------------------------------------------------------------------------

def _int_args(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int)


@example("for k in T.serial(T.ceildiv(512, 32)):", "    Y[k] = X[k]")
def ceildiv(a: Any, b: Any) -> Any:
    """a / b rounded up; Python ints give a Python int."""
    for v in (a, b):
        if isinstance(v, float) or isinstance(v, Expr) and v.dtype.is_float:
            raise error("math-type", f"T.ceildiv divides «integers», found {describe(v)}",
                        hint="T.ceil(a / b) rounds a quotient of floats up")
    if _int_args(a, b):
        return -(-a // b)
    a, b = (int(v.value) if isinstance(v, Const) and v.dtype.is_int else v for v in (a, b))
    if _int_args(a, b):
        return -(-a // b)
    if b < 0 if isinstance(b, int) else differs(b):  # may be negative, where a + b - 1 is one too many
        q = binary("floordiv", _py(a), _py(b))
        return q + cast(binary("floormod", _py(a), _py(b)) != 0, q.dtype)
    return (a + (b - 1)) // b


cdiv = ceildiv


@example("threads = T.align_up(100, 32)   # 128")
def align_up(x: Any, y: Any) -> Any:
    """The least multiple of y that is not below x."""
    if is_const(convert(y), 0):
        raise error("math-type", "T.align_up to multiples of ‹0›", expected="a positive integer",
                    hint="give the size of the unit")
    return ceildiv(x, y) * y


def _operator(op: str, name: str) -> Callable[[Any, Any], Expr]:
    def fn(a: Any, b: Any) -> Expr:
        return binary(op, _py(a), _py(b))

    return named(fn, op, f"`{op}` of two values.\n\nExample:\n    I[i] = T.{name}(I[i], 3)")


floordiv, floormod, truncdiv, truncmod = (_operator(n, n) for n in ("floordiv", "floormod", "truncdiv", "truncmod"))
shift_left, shift_right = _operator("shl", "shift_left"), _operator("shr", "shift_right")
bitwise_and, bitwise_or, bitwise_xor = (_operator(f"bit{n}", f"bitwise_{n}") for n in ("and", "or", "xor"))


@example("I[i] = T.bitwise_not(I[i])")
def bitwise_not(x: Any) -> Expr:
    """~x."""
    return unary("bitnot", value_of(x))


@example("r, c = T.index_to_coordinates(i, (64, 32))   # i // 32, i % 32")
def index_to_coordinates(index: Any, shape: Any) -> list[Any]:
    """Row-major coordinates of a linear index."""
    out: list[Any] = []
    for d in reversed(list(shape)):
        out.append(index % d)
        index = index // d
    return out[::-1]


@example("if T.likely(i < n):", "    Y[i] = X[i]")
def likely(x: Any) -> Expr:
    """x; a hint that it is usually true."""
    return value_of(x)


__all__ = ["abs", "align_up", "bitwise_not", "cdiv", "ceildiv", "clamp", "copysign", "extract_lane", "fabs", "if_then_else",
           "index_to_coordinates", "infinity", "isnullptr", "ldexp", "likely", "max", "max_value", "min", "min_value",
           "nextafter", "pow", "reinterpret", "round", "where", "__fns"]
