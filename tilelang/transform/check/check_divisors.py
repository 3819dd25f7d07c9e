"""Reject integer divisions by the constant 0: the value is undefined and differs between targets."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Alloc, Binary, Buffer, Const, Func, Node, children, walk

from ..framework.pass_ import TILE, PassContext, pass_

register("division-by-zero", ZeroDivisionError, "an integer division or remainder by the constant 0",
         "guard it by a condition that is known while compiling, or divide by max(divisor, 1)", expected="another divisor")
_NAMES = {"floordiv": "//", "floormod": "%", "truncdiv": "T.truncdiv", "truncmod": "T.truncmod"}


@pass_(needs=TILE)
def check_divisors(func: Func, cx: PassContext) -> Func:
    """Reject integer `//` and `%` whose divisor is always 0, also in code that no thread reaches.

    Changes nothing. Raises division-by-zero at the user's statement.
    """
    shapes = [b for _, b in func.buffers]
    if any(map(_in_shape, shapes)) or any(
            _undefined(n) or isinstance(n, Alloc) and _in_shape(n.buffer) for n in walk(func.body)):
        _reject(func.body, func.span)
        for b in shapes:
            for n in b.shape:
                _reject(n, func.span)
    return func


def _undefined(n: Any) -> bool:
    return isinstance(n, Binary) and n.op in _NAMES and isinstance(n.b, Const) and n.b.value == 0


def _in_shape(b: Buffer) -> bool:
    return any(isinstance(n, Node) and any(map(_undefined, walk(n))) for n in b.shape)


def _reject(n: Any, span: Any) -> None:
    """Raise for the first such division in n, at the innermost known place in the source."""
    span = getattr(n, "span", None) or span
    if _undefined(n):
        raise error("division-by-zero", f"`{_NAMES[n.op]}` of {n.a.dtype} by the constant 0: expected another divisor, "
                    f"found `{n}`",
                    found=f"`{n}`", span=span)
    if isinstance(n, Alloc):
        for e in n.buffer.shape:
            _reject(e, span)
    if isinstance(n, Node):
        for c in children(n):
            _reject(c, span)


__all__ = ["check_divisors"]
