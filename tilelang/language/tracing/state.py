"""The builder of the function being traced in this thread, if any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from inspect import cleandoc
from types import CodeType
from typing import Any, TypeVar

from tilelang import errors
from tilelang.errors import positions
from tilelang.ir import Buffer, Const, Expr, Load, Span, Var
from tilelang.ir.expr import Traces


F = TypeVar("F")


def named(fn: F, name: str, doc: str | None) -> F:
    """A function of the language that is made at run time, with its name and documentation."""
    for attribute, value in (("__name__", name), ("__qualname__", name), ("__doc__", doc)):
        setattr(fn, attribute, value)
    return fn


def example(*lines: str) -> Callable[[F], F]:
    """Decorator: adds a short example to the documentation of a function of the language."""
    def documented(fn: F) -> F:
        fn.__doc__ = "\n    ".join((f"{cleandoc(fn.__doc__ or '').rstrip()}\n\nExample:", *lines))
        return fn

    return documented


class _State(threading.local):
    builder: Any = None  # of builder.Builder, which is above this module


_state, _lock = _State(), threading.Lock()


def current() -> Any:
    """The function being traced in this thread, or None outside a kernel function."""
    return _state.builder


def set_current(builder: Any) -> Any:
    """Make a builder the active one; returns the one it replaces."""
    old, _state.builder = _state.builder, builder
    if (old is None) != (builder is None):
        with _lock:
            Traces.running += 1 if old is None else -1
    return old


def need_tracing(what: str) -> Any:
    """The function being traced.  Raises no-builder (JITNoBuilderError) naming `what` outside a kernel function."""
    b = _state.builder
    if b is None:
        raise errors.error("no-builder", f"{what} can only be used inside a function under construction (T.prim_func, T.macro "
                           "or tilelang.jit)", found=f"{what} outside of one", span=user_place())
    return b


def span_of(code: CodeType, lasti: int, line: int, caller: Span | None = None) -> Span:
    """The place of an instruction in the user's code; its line where this Python does not record columns."""
    at, end_line, col, end_col = positions(code, lasti) or (line, line, 0, 0)
    return Span(code.co_filename, at, col, end_line, end_col, code.co_name if code.co_name != "<module>" else "", caller)


def user_place() -> Span | None:
    """The innermost call in the user's code, outside any traced function."""
    call = errors.caller()
    return None if call is None else span_of(*call)


def place() -> Span | None:
    """The user's span: the statement being traced, or the call outside any kernel function."""
    b = _state.builder
    return b.here() if b is not None else user_place()


def reject_operators(cls: type, method: Any) -> None:
    """Let every operator, and every question for a number, of a class call this method, which raises."""
    for name in "add sub mul truediv floordiv mod lshift rshift and or xor pow matmul divmod".split():
        setattr(cls, f"__{name}__", method)
        setattr(cls, f"__r{name}__", method)
    for name in "lt le gt ge eq ne neg invert abs round index int float getitem".split():
        setattr(cls, f"__{name}__", method)
    cls.__hash__ = object.__hash__  # type: ignore[assignment]


def need_function(fn: Any, decorator: str) -> Any:
    """Check the argument of a decorator of kernel functions.  Raises not-a-function unless it is a function or method."""
    if not isinstance(getattr(fn, "__code__", None), CodeType):
        raise errors.error("not-a-function", f"{decorator} takes a function, found a {type(fn).__name__}", span=user_place())
    return fn


def describe(value: Any) -> str:
    """A description of a value in the terms of the language, for error messages."""
    if isinstance(value, Buffer):
        return f"the buffer `{value.name}`"
    if isinstance(value, Load):
        return f"an element of `{value.buffer.name}`"
    if isinstance(value, Const):
        return f"the constant {value.value}"
    if isinstance(value, Var):
        return f"the value `{value.name}`"
    if isinstance(value, Expr):
        return f"an expression of type {value.dtype}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    region = getattr(value, "region", None)  # BufferSlice: regions.py is above this module
    return f"a region of `{region.buffer.name}`" if region is not None else f"a {type(value).__name__}"


def error(kind: str, message: str, hint: str = "", *, expected: str = "", found: str | None = None) -> errors.TileLangError:
    """The error of a kind at the user's line."""
    return errors.error(kind, message, expected=expected, found=found, span=place(), hint=hint)
