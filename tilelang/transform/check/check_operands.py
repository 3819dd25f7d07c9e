"""Reject integer operations with a constant that has no meaning: divisions by 0, shifts by no amount of the type."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Alloc, Binary, Broadcast, Buffer, Cast, Const, Func, Node, children, walk
from tilelang.ir.numbers import wrapped

from ..framework.pass_ import TILE, PassContext, pass_

register("division-by-zero", ZeroDivisionError, "an integer division or remainder by the constant 0",
         "guard it by a condition that is known while compiling, or divide by max(divisor, 1)", expected="another divisor")
register("shift-range", ValueError, "a shift by a constant that is negative, or not less than the bits of the type",
         "shift a wider type: T.cast(x, \"int64\") << n", expected="an amount below the bits of the type")
_NAMES = {"floordiv": "//", "floormod": "%", "truncdiv": "T.truncdiv", "truncmod": "T.truncmod", "shl": "<<", "shr": ">>"}


@pass_(needs=TILE)
def check_operands(func: Func, cx: PassContext) -> Func:
    """Reject integer `//` and `%` whose divisor is always 0, and `<<` and `>>` by a constant outside 0 .. bits - 1.

    Code that no thread reaches is checked too. An amount known only at run time is taken as unsigned; one that is too large
    shifts all bits out.
    Changes nothing. Raises division-by-zero, shift-range at the user's statement.
    """
    shapes = [b for _, b in func.buffers]
    if any(map(_in_shape, shapes)) or any(
            _undefined(n) or isinstance(n, Alloc) and _in_shape(n.buffer) for n in walk(func.body)):
        _reject(func.body, func.span)
        for b in shapes:
            for n in _sizes(b):
                _reject(n, func.span)
    return func


def _undefined(n: Any) -> bool:
    if not (isinstance(n, Binary) and n.op in _NAMES):
        return False
    by = _constant(n.b)
    return by is not None and (not 0 <= by < n.dtype.bits if n.op in ("shl", "shr") else by == 0)


def _constant(e: Any) -> int | None:
    """The integer that e always is, in every lane; None for a value of the run."""
    if isinstance(e, Broadcast):
        return _constant(e.value)
    if isinstance(e, Cast) and e.dtype.is_int and e.value.dtype.is_int:
        inner = _constant(e.value)
        return None if inner is None else wrapped(inner, e.dtype.scalar)
    return e.value if isinstance(e, Const) and e.dtype.is_int else None


def _sizes(b: Buffer) -> tuple[Any, ...]:
    return *b.shape, *(b.strides_ or ()), b.offset


def _in_shape(b: Buffer) -> bool:
    return any(isinstance(n, Node) and any(map(_undefined, walk(n))) for n in _sizes(b))


def _reject(n: Any, span: Any) -> None:
    """Raise for the first such operation in n, at the innermost known place in the source."""
    span = getattr(n, "span", None) or span
    if _undefined(n):
        name, shift = f"`{_NAMES[n.op]}` of {n.a.dtype}", n.op in ("shl", "shr")
        expected = f"an amount of 0 to {n.dtype.bits - 1}" if shift else "another divisor"
        raise error("shift-range" if shift else "division-by-zero",
                    f"{name} by the constant {_constant(n.b)}: expected {expected}, found `{n}`",
                    expected=expected, found=f"`{n}`", span=span)
    if isinstance(n, Alloc):
        for e in _sizes(n.buffer):
            _reject(e, span)
    if isinstance(n, Node):
        for c in children(n):
            _reject(c, span)
