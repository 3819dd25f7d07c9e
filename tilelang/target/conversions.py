"""Conversions in a given direction, and to 8-bit floats without saturation, composed of plain conversions."""

from __future__ import annotations

from tilelang.ir import Expr, binary, call, cast, const, dtype as DType, logical, select, unary, BOOL, F32
from tilelang.ir.dtype import float_max

F64 = DType("float64")

INTO_INTEGERS = {"rn": "nearbyint", "rp": "ceil", "rm": "floor"}  # plain conversions round towards 0 (rz)
# Overflow of unsaturated conversions: (code of the result, magnitude from which it applies, whether that is included).
UNSATURATED = {"float8_e4m3": (0x7F, 464.0, False), "float8_e4m3fn": (0x7F, 464.0, False),
           "float8_e5m2": (0x7C, 61440.0, True), "float8_e4m3fnuz": (0x80, 248.0, True),
           "float8_e5m2fnuz": (0x80, 61440.0, True)}


def towards(e: Expr, dt: DType, mode: str) -> Expr:
    """e rounded in the direction of `mode`, found from the nearest number and its neighbour.  8-bit floats saturate."""
    x, near = _wide(e, dt), cast(e, dt)
    y = _wide(near, e.dtype)
    lower, higher = binary("lt", y, x), binary("lt", x, y)
    if mode == "rz":
        inward = logical("or", logical("and", binary("gt", y, 0.0), higher), logical("and", binary("lt", y, 0.0), lower))
        return select(inward, _stepped(near, x, y, -1), near)
    wrong, outward = (lower, binary("ge", y, 0.0)) if mode == "rp" else (higher, binary("le", y, 0.0))
    further = _stepped(near, x, y, 1)
    if dt.base in UNSATURATED:
        further = select(binary("lt", call("fabs", (y,), y.dtype), const(float_max(dt.base), y.dtype.scalar)), further, near)
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


def unsaturated(e: Expr, near: Expr, mode: str) -> Expr:
    """near, or for numbers beyond the range infinity where the type has one, else NaN."""
    dt = near.dtype
    number, least, included = UNSATURATED[dt.base]
    x = _wide(e, dt)
    most, infinite = const(float_max(dt.base), x.dtype.scalar), const(float("inf"), x.dtype.scalar)
    if mode in ("", "rn"):
        beyond = binary("ge" if included else "gt", call("fabs", (x,), x.dtype), const(least, x.dtype.scalar))
    else:
        beyond = binary("eq", call("fabs", (x,), x.dtype), infinite)
        if mode != "rz":
            beyond = logical("or", beyond, binary("gt", x, most) if mode == "rp" else binary("lt", x, unary("neg", most)))
    negative = number if number == 0x80 else number | 0x80
    return select(beyond, select(binary("lt", x, 0.0), _code(negative - 256, dt), _code((number + 128) % 256 - 128, dt)), near)
