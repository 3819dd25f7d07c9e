"""Conversions with a rounding mode, and to 8-bit floats without saturation, composed of plain conversions."""

from __future__ import annotations

from tilelang.ir import BOOL, F32, Expr, binary, call, cast, const, logical, select, unary
from tilelang.ir import dtype as DType
from tilelang.ir.dtype import float_max

from .tracing.state import error

F64 = DType("float64")

INTO_INTEGERS = {"rn": "nearbyint", "rp": "ceil", "rm": "floor"}  # plain conversions round towards 0 (rz)
# Overflow of unsaturated conversions: (code of the result, magnitude from which it applies, whether that is included).
_BEYOND = {"float8_e4m3": (0x7F, 464.0, False), "float8_e4m3fn": (0x7F, 464.0, False),
           "float8_e5m2": (0x7C, 61440.0, True), "float8_e4m3fnuz": (0x80, 248.0, True),
           "float8_e5m2fnuz": (0x80, 61440.0, True)}


def converted(e: Expr, dt: DType, mode: str, sat: bool) -> Expr:
    """e in type dt, rounded to nearest (rn, ""), towards 0 (rz), up (rp) or down (rm).

    Raises cast-option for a rounding mode that a type does not support (below 8 bits, float8_e8m0fnu, integers of 64
    bits), and for sat=False where a type has neither infinity nor NaN.
    """
    if not dt.is_float:
        inside = INTO_INTEGERS.get(mode) if e.dtype.is_float else None
        return cast(call(inside, (e,), e.dtype) if inside else e, dt)
    if not sat and dt.bits <= 8 and dt.base not in _BEYOND:
        raise error("cast-option", f"T.cast to {dt} with sat=False: the type has no number beyond its greatest",
                    expected="sat=True", found="sat=False")
    if e.dtype.scalar == dt.scalar or mode in ("", "rn") and (sat or dt.base not in _BEYOND):
        return cast(e, dt)
    if e.dtype.is_int and e.dtype.bits <= 32 or e.dtype.is_bool:
        e = cast(e, F64.with_lanes(e.dtype.lanes))
    if not e.dtype.is_float or dt.bits < 8 or dt.base == "float8_e8m0fnu":
        raise error("cast-option", f"T.cast of {e.dtype} to {dt} with round={mode!r} is not available",
                    expected="a float or an integer of at most 32 bits, to a float with a sign of at least 8",
                    found=f"{e.dtype} to {dt}")
    near = cast(e, dt) if mode in ("", "rn") else _towards(e, dt, mode)
    return near if sat or dt.base not in _BEYOND else _unsaturated(e, near, mode)


def _towards(e: Expr, dt: DType, mode: str) -> Expr:
    """e rounded in the direction of `mode`, found from the nearest number and its neighbour.  8-bit floats saturate."""
    x, near = _wide(e, dt), cast(e, dt)
    y = _wide(near, e.dtype)
    lower, higher = binary("lt", y, x), binary("lt", x, y)
    if mode == "rz":
        inward = logical("or", logical("and", binary("gt", y, 0.0), higher), logical("and", binary("lt", y, 0.0), lower))
        return select(inward, _stepped(near, x, y, -1), near)
    wrong, outward = (lower, binary("ge", y, 0.0)) if mode == "rp" else (higher, binary("le", y, 0.0))
    further = _stepped(near, x, y, 1)
    if dt.base in _BEYOND:
        further = select(binary("lt", _size(y), const(float_max(dt.base), y.dtype.scalar)), further, near)
    return select(wrong, select(outward, further, _stepped(near, x, y, -1)), near)


def _stepped(near: Expr, x: Expr, y: Expr, by: int) -> Expr:
    """The number whose magnitude's code is one more or one less than near's; next to zero, the least number of x's sign."""
    dt = near.dtype
    code = DType(f"int{dt.bits}").with_lanes(dt.lanes)
    out: Expr = call("reinterpret", (binary("add", call("reinterpret", (near,), code), const(by, code.scalar)),), dt)
    if by < 0 and "fnuz" in dt.base:  # in these types the code of negative zero is a NaN
        return select(call("isnan", (_wide(out, dt),), BOOL.with_lanes(dt.lanes)), _code(0, dt), out)
    if by < 0:
        return out
    least = select(binary("lt", x, 0.0), _code(1 - 2 ** (dt.bits - 1), dt), _code(1, dt))
    return select(binary("eq", y, 0.0), least, out)


def _code(number: int, dt: DType) -> Expr:
    """The float of type dt whose bits are those of the signed integer `number`."""
    code = DType(f"int{dt.bits}")
    return call("reinterpret", (cast(const(number, code), code.with_lanes(dt.lanes)),), dt)


def _wide(e: Expr, other: DType) -> Expr:
    """e in a type that represents all numbers of its type and of the other type."""
    return cast(e, (F64 if 64 in (e.dtype.bits, other.bits) else F32).with_lanes(e.dtype.lanes))


def _size(e: Expr) -> Expr:
    return call("fabs", (e,), e.dtype)


def _unsaturated(e: Expr, near: Expr, mode: str) -> Expr:
    """near, or for numbers beyond the range infinity where the type has one, else NaN."""
    dt = near.dtype
    number, least, included = _BEYOND[dt.base]
    x = _wide(e, dt)
    most, infinite = const(float_max(dt.base), x.dtype.scalar), const(float("inf"), x.dtype.scalar)
    if mode in ("", "rn"):
        beyond = binary("ge" if included else "gt", _size(x), const(least, x.dtype.scalar))
    else:
        beyond = binary("eq", _size(x), infinite)
        if mode != "rz":
            beyond = logical("or", beyond, binary("gt", x, most) if mode == "rp" else binary("lt", x, unary("neg", most)))
    negative = number if number == 0x80 else number | 0x80
    return select(beyond, select(binary("lt", x, 0.0), _code(negative - 256, dt), _code((number + 128) % 256 - 128, dt)), near)


__all__ = ["converted"]
