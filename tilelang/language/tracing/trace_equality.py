"""Rejects `==` of run-time expressions as a Python truth value; other expressions are compared by structure.

`if bx == 0` in a helper function that is not a macro, `match bx:`, `any([a == b])` and `list.index` ask Python for the
truth of `==` while tracing.  Two different expressions are then "not equal", even if their values are equal at run time, and
the program would silently take that branch for every block and every element.
"""

from __future__ import annotations

import sys
from typing import Any

from tilelang import errors
from tilelang.ir import Binary, Call, Expr, Load, Var, distinct
from tilelang.ir.expr import unlike_sides

from .regions import BufferSlice
from .state import current


@unlike_sides.provide
def reject_unlike(e: Binary) -> None:
    """Called with `a == b` or `a != b` used as a truth value, where a and b are not the same expression.

    Shape symbols are compared by identity, expressions of shape symbols by structure.  Raises condition when the user's code
    compares values that differ between threads, blocks, iterations or calls.
    """
    b = current()
    if b is None or isinstance(e.a, Var) and isinstance(e.b, Var) and not (differs(e.a) and differs(e.b)):
        return
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith("tilelang.") and not caller.startswith("tilelang.library"):
        return
    if differs(e):
        raise errors.error("condition", f"`{_text(e)}` is asked for a Python truth value, and only the kernel knows it",
                           expected="a value known while tracing", found=f"`{_text(e)}`",
                           span=b.here(), hint="match, any, all, list.index and helper functions that are not "
                           "macros decide while tracing: use `if` in the kernel or a T.macro, T.if_then_else, or "
                           "join conditions with `and` and `or`")


def differs(value: Any) -> bool:
    """Whether the value, or an element of a container, is known only at run time.  Shape symbols are not."""
    if isinstance(value, (tuple, list, dict)):
        return any(map(differs, value.values() if isinstance(value, dict) else value))
    if isinstance(value, BufferSlice) or hasattr(value, "__tilelang_expr__"):
        return True
    b = current()
    if b is None or not isinstance(value, Expr):
        return False
    scalars = {id(var) for var, buffer in b.params.values() if buffer is None}
    return any(isinstance(x, (Load, Call)) or isinstance(x, Var) and (x.span is not None or id(x) in scalars)
               for x in distinct(value, Load, Call, Var))


def _text(e: Expr) -> str:
    text = repr(e)
    return text if len(text) < 60 else text[:57] + "..."


__all__ = ["differs", "reject_unlike"]
