"""Builds expressions that have no Python operator: logical and/or, selections, calls of intrinsics, values of a dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.errors import facts
from .buffer import Buffer
from .call_options import options_of
from .dtype import dtype, value_of_type
from .expr import (BOOL, FALSE, TRUE, Binary, Broadcast, Call, Const, Expr, Ramp, Select, Shuffle, Var, as_bool, can_go, cast,
                   const, convert, match)
from .span import Span
from .stmt import Evaluate, For, Stmt


def logical(op: str, a: Any, b: Any) -> Expr:
    """`a and b` or `a or b`, with short-circuit evaluation.  An integer operand x means `x != 0`."""
    a, b = as_bool(a), as_bool(b)
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            if x.value == (op == "and"):
                return y
            if x is a or can_go(y):  # the first operand is evaluated whatever the value of the second is
                return FALSE if op == "and" else TRUE
    return Binary(op, a, b, BOOL.with_lanes(max(a.dtype.lanes, b.dtype.lanes)))


def select(cond: Any, a: Any, b: Any, lazy: bool = True) -> Expr:
    """cond ? a : b, with operands promoted.  A literal condition is folded; a vector condition selects per lane."""
    cond = as_bool(cond)
    a, b = match(convert(a), convert(b)) if isinstance(a, Expr) or isinstance(b, Expr) is False else match(a, b)
    if isinstance(cond, Const):
        return a if cond.value else b
    if cond.dtype.lanes > 1:
        wide = a.dtype if a.dtype.lanes > 1 else a.dtype.with_lanes(cond.dtype.lanes)
        if wide.lanes != cond.dtype.lanes:
            raise facts(TypeError(f"a condition of {cond.dtype.lanes} lanes chooses between {a.dtype}"),
                        f"{cond.dtype.lanes} lanes", f"{wide.lanes}")
        a, b = cast(a, wide), cast(b, wide)
    return Select(cond, a, b, a.dtype, lazy)


def call(op: str, args: Any, dt: Any, span: Span | None = None, **options: Any) -> Call:
    """A call of the intrinsic `op`.  options: fields of its record (call_options.py).  Raises TypeError for unknown options."""
    given = options_of(op, options) if options else None
    return Call(op, tuple(convert(a) for a in args), dtype(dt), given, span=span)  # type: ignore[arg-type]


def ramp(first: Expr, lanes: int) -> Ramp:
    """The indices first, first + 1, ... of so many lanes."""
    return Ramp(first, const(1, first.dtype), lanes, first.dtype.with_lanes(lanes))


def do(name: str, *args: Any, span: Span | None = None, **options: Any) -> Evaluate:
    """A call of an intrinsic for its effect."""
    return Evaluate(call(name, args, "void", span=span, **options), span=span)


def unrolled(loops: list[tuple[Var, int]], body: Stmt) -> Stmt:
    """The body in unrolled loops over variables from 0 to extents, the first one outermost."""
    for v, n in reversed(loops):
        body = For(v, const(0), const(n), "unroll", body)
    return body


def each_register(array: Buffer, body: Callable[[Var], Stmt], span: Span | None = None) -> Stmt:
    """body(index) for every element of an array of a thread."""
    v = fresh("r")
    return For(v, const(0), const(int(array.shape[0])), "unroll", body(v), span=span)


@value_of_type.provide
def construct(dt: dtype, values: tuple[Any, ...]) -> Expr:
    """The result of calling a dtype: T.int32() is a variable, T.float32(1.5) a constant, T.float16(expr) a cast.

    Several values are packed into a vector.
    """
    if not values:
        return Var("v", dt)
    if any(isinstance(v, str) for v in values):
        raise facts(TypeError(f"{dt}() takes numbers or expressions, not strings"), "numbers or expressions", "a string")
    if dt.lanes > 1 and len(values) > 1:
        if len(values) != dt.lanes:
            raise facts(TypeError(f"{dt}() takes 1 or {dt.lanes} values, found {len(values)}"),
                        f"1 or {dt.lanes} values", str(len(values)))
        lanes = tuple(cast(convert(v), dt.scalar) for v in values)
        return Shuffle(lanes, tuple(range(dt.lanes)), dt)
    if len(values) != 1:
        raise facts(TypeError(f"{dt}() takes at most one value, found {len(values)}"), "at most one value", str(len(values)))
    v = values[0]
    if isinstance(v, Expr):
        return cast(v, dt)
    if isinstance(v, (bool, int, float, np.generic)):
        if dt.is_int and dt.lanes == 1:
            return const(int(v), dt)
        inner = const(v, dt.scalar)
        return inner if dt.lanes == 1 else Broadcast(inner, dt.lanes, dt)
    if getattr(v, "__tilelang_expr__", None) is not None:
        return cast(convert(v), dt)
    raise facts(TypeError(f"{dt}() takes a number or an expression, found {type(v).__name__}"),
                "a number or an expression", f"a {type(v).__name__}")


def fresh(name: str, dt: Any = "int32") -> Var:
    """A new variable."""
    return Var(name, dtype(dt))
