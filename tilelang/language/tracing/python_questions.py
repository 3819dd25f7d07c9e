"""Rejects what Python's protocols ask of run-time values while a function is traced.  Others are compared by structure.

`if bx == 0` in a helper function that is not a macro, `match bx:`, `any([a == b])` and `list.index` ask Python for the
truth of `==` while tracing.  Two different expressions are then "not equal", even if their values are equal at run time, and
the program would silently take that branch for every block and every element.  In the same way `{0: a, 1: b}.get(bx)` asks
for a hash, which is never that of 0 or 1, and f"{bx}" for a text, which is that of the expression.
"""

from __future__ import annotations

import ast
import dis
import sys
from typing import Any

from tilelang import errors
from tilelang.ir import AddressOf, Binary, Call, Expr, Load, Var, distinct
from tilelang.ir.expr import questions, unlike_sides

from .python_functions import expression
from .regions import BufferSlice
from .state import current

_ON_BEHALF = (BufferSlice.__module__, f"{__package__}.conditions", f"{__package__}.names")
_TEXTS = ("str", "format", "format_map", "join")
_SHOWING = ("bdb", "logging", "pdb", "pprint", "traceback", "warnings")  # modules that show texts to people

_HINTS = {"hash": "a dict, a set and a cached function look values up while tracing: use `if` in the kernel or a T.macro, "
                  "T.if_then_else, or keep the table in a tensor",
          "text": "a string is made while tracing: T.print(x) prints values while the kernel runs; print(x) and repr(x) show "
                  "the expression",
          "pickle": "it is one value of this kernel: copy.copy(x) is x",
          "truth value": "match, any, all, list.index and helper functions that are not macros decide while tracing: use `if` "
                         "in the kernel or a T.macro, T.if_then_else, or join conditions with `and` and `or`"}
errors.register("python-question", TypeError, "Python asks a run-time value for what only the kernel knows",
                expected="a value known while tracing")


@questions.provide
def reject_question(value: Any, protocol: str, frames: int) -> None:
    """Called with a value of which Python asks a hash, a text or a truth value.  repr(x) and print(x) are no questions.

    Raises python-question when the user's code asks it of a value that differs between threads, blocks, iterations or calls.
    """
    asked = "text" if protocol in ("str", "repr") else protocol
    b = current()
    if b is None or (frame := _asking(frames + 1)) is None or not differs(value):
        return
    if protocol in ("text", "str", "repr") and _shows(frame, protocol):
        return
    raise errors.error("python-question", f"‹`{_text(value)}`› is asked for its {asked} while tracing, and only the kernel "
                       "knows its value", span=b.here(), hint=_HINTS.get(asked, "compare it with a number"))


@unlike_sides.provide
def reject_unlike(e: Binary) -> None:
    """Called with `a == b` or `a != b` used as a truth value, where a and b are not the same expression.

    Shape symbols are compared by identity, expressions of shape symbols by structure.  Raises condition when the user's code
    compares values that differ between threads, blocks, iterations or calls.
    """
    b = current()
    if b is None or isinstance(e.a, Var) and isinstance(e.b, Var) and not (differs(e.a) and differs(e.b)):
        return
    if _asking(3) is not None and differs(e):
        raise errors.error("condition", f"‹`{_text(e)}`› is asked for a Python truth value, and only the kernel knows it",
                           expected="a value known while tracing", span=b.here(), hint=_HINTS["truth value"])


def _asking(frames: int) -> Any:
    """The frame of the user's code on whose behalf the function so many frames up asks; None if this package asks.

    Its kernels count as a user's.  Python's library asks for who called it (Counter, sorted keys, dataclasses), operators of
    traced code and a region for the code, and methods that make a text for who wants it."""
    frame: Any = sys._getframe(frames)
    caller = frame.f_globals.get("__name__", "")
    while frame.f_back is not None and (caller in _ON_BEHALF or caller.partition(".")[0] in sys.stdlib_module_names or
                                        frame.f_code.co_name in ("__repr__", "__str__") and not caller.startswith("tilelang.")):
        if caller.partition(".")[0] in _SHOWING:
            return None
        frame = frame.f_back
        caller = frame.f_globals.get("__name__", "")
    return frame if not caller.startswith("tilelang.") or caller.startswith("tilelang.library") else None


def _shows(frame: Any, protocol: str) -> bool:
    """Whether a frame asks for a text by repr(x), or by print(x).  Where a call has no text: whether its code names them."""
    code = frame.f_code
    if not dis.opname[code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL")):
        return False
    place = errors.positions(code, frame.f_lasti)
    tree = expression(code.co_filename, *place) if place is not None else None
    names = {ast.unparse(tree.func).rpartition(".")[2]} if isinstance(tree, ast.Call) else {*code.co_names}
    return names.isdisjoint(_TEXTS) if protocol == "repr" else not names.isdisjoint(("print", "repr"))


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
    return any(isinstance(x, (Load, Call, AddressOf)) or isinstance(x, Var) and (x.span is not None or id(x) in scalars)
               for x in distinct(value, AddressOf, Load, Call, Var))


def _text(e: Any) -> str:
    text = repr(e)
    return text if len(text) < 60 else text[:57] + "..."
