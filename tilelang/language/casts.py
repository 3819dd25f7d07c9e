"""T.cast with a rounding mode, and to 8-bit floats without saturation."""

from __future__ import annotations

from tilelang.ir import Expr, call, cast
from tilelang.ir import dtype as DType
from tilelang.target.conversions import F64, INTO_INTEGERS, UNSATURATED, towards, unsaturated

from .tracing.state import error


def converted(e: Expr, dt: DType, mode: str, sat: bool) -> Expr:
    """e in type dt, rounded to nearest (rn, ""), towards 0 (rz), up (rp) or down (rm).

    Raises cast-option for a rounding mode that a type does not support (below 8 bits, float8_e8m0fnu, integers of 64
    bits), and for sat=False where a type has neither infinity nor NaN.
    """
    if not dt.is_float:
        inside = INTO_INTEGERS.get(mode) if e.dtype.is_float else None
        return cast(call(inside, (e,), e.dtype) if inside else e, dt)
    if not sat and dt.bits <= 8 and dt.base not in UNSATURATED:
        raise error("cast-option", f"T.cast to {dt} with sat=False: the type has no number beyond its greatest",
                    expected="sat=True", found="sat=False")
    if e.dtype.scalar == dt.scalar or mode in ("", "rn") and (sat or dt.base not in UNSATURATED):
        return cast(e, dt)
    if e.dtype.is_int and e.dtype.bits <= 32 or e.dtype.is_bool:
        e = cast(e, F64.with_lanes(e.dtype.lanes))
    if not e.dtype.is_float or dt.bits < 8 or dt.base == "float8_e8m0fnu":
        raise error("cast-option", f"T.cast of {e.dtype} to {dt} with round={mode!r} is not available",
                    expected="a float or an integer of at most 32 bits, to a float with a sign of at least 8",
                    found=f"{e.dtype} to {dt}")
    near = cast(e, dt) if mode in ("", "rn") else towards(e, dt, mode)
    return near if sat or dt.base not in UNSATURATED else unsaturated(e, near, mode)
