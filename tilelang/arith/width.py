"""Widens index expressions to 64 bits: block and loop variables fit in 32 bits, their products may not."""

from __future__ import annotations

from collections.abc import Mapping

from tilelang.ir import Binary, Expr, Select, Unary, Var, binary, cast, replace

_EXACT = ("add", "sub", "mul", "floordiv", "floormod", "truncdiv", "truncmod", "min", "max")


def widened(e: Expr, names: Mapping[Var, Expr] | None = None) -> Expr:
    """A 32-bit index expression, computed in int64 so that it does not wrap.

    names: int64 replacements of variables, such as the int64 copy of a bound name.  Other variables, loads and calls are cast.
    """
    if not e.dtype.is_int or e.dtype.lanes != 1 or e.dtype.bits >= 64:
        return e
    if isinstance(e, Var) and names is not None and e in names:
        return names[e]
    if isinstance(e, Binary) and e.op in _EXACT:
        return binary(e.op, widened(e.a, names), widened(e.b, names), span=e.span)
    if isinstance(e, Unary) and e.op == "neg":
        a = widened(e.a, names)
        return replace(e, a=a, dtype=a.dtype)
    if isinstance(e, Select):
        a, b = widened(e.a, names), widened(e.b, names)
        return replace(e, a=a, b=b, dtype=a.dtype)
    return cast(e, "int64")
