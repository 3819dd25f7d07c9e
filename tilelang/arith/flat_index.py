"""Computes the offset of an element in the storage of its buffer, and the lanes of vector expressions.

Widens index expressions to 64 bits: block and loop variables fit in 32 bits, their products may not.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilelang.ir import (I32, I64, Binary, Broadcast, Buffer, Cast, Expr, Ramp, Select, Shuffle, Unary, Var, binary, cast,
                         const, is_const, rebuild, replace)

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


def flat_index(buffer: Buffer, indices: tuple[Expr, ...]) -> Expr:
    """Offset of buffer[indices] from the start of its storage, in elements.  int64 unless it is proven to fit in 32 bits."""
    if len(indices) == 1 and not isinstance(buffer.offset, Expr) and buffer.strides[0] == 1:
        return binary("add", indices[0], const(buffer.offset, indices[0].dtype)) if buffer.offset else indices[0]
    small = buffer.is_static and all(isinstance(x, int) for x in (*buffer.strides, buffer.offset)) and \
        buffer.offset + sum((int(d) - 1) * abs(int(x)) for d, x in zip(buffer.shape, buffer.strides)) < 2**31
    wide = I32 if small and not any(i.dtype.bits > 32 for i in indices) else I64
    out: Expr = const(0, wide)
    for i, step in zip(indices, buffer.strides):
        step_expr = widened(step) if isinstance(step, Expr) else const(step, wide)  # dynamic: wide is I64
        out = binary("add", out, binary("mul", i if i.dtype == wide else cast(i, wide), step_expr))
    offset = buffer.offset
    return binary("add", out, widened(offset) if isinstance(offset, Expr) else const(offset, wide))


def vector_base(buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
    """Indices of the first lane when the access is one contiguous vector, else None."""
    *rest, last = indices
    if isinstance(last, Ramp) and is_const(last.stride, 1) and all(i.dtype.lanes == 1 for i in rest) \
            and buffer.strides[-1] == 1:
        return (*rest, last.base)
    return None


def lane_of(e: Expr, k: int) -> Expr:
    """The scalar expression of lane k of a vector expression; a scalar is every lane of itself."""
    if e.dtype.lanes == 1:
        return e
    if isinstance(e, Ramp):
        return binary("add", e.base, binary("mul", const(k, e.base.dtype), e.stride))
    if isinstance(e, Broadcast):
        return e.value
    if isinstance(e, (Binary, Unary, Cast)):
        out = rebuild(e, lambda v: lane_of(v, k) if isinstance(v, Expr) else v)
        return type(out)(**{**{f: getattr(out, f) for f in out.__dataclass_fields__}, "dtype": e.dtype.scalar})
    return Shuffle((e,), (k,), e.dtype.scalar)
