"""Functions that read and set the span (the source location) of statements, buffers and functions.

Comparison and hash of a node ignore its span.  Setting the span therefore changes the node itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

from .buffer import Buffer
from .nodes import Node
from .span import Span
from .stmt import Func, Stmt
from .visitor import walk


def make_span(file: str, line: int, column: int = 0) -> Span:
    """A span of a file: path, line from 1, column from 0."""
    return Span(str(file), int(line), int(column))


N = TypeVar("N", bound=Node)


def _checked(node: Any, kind: type[N], what: str) -> N:
    if not isinstance(node, kind):
        raise TypeError(f"{what} is expected, found {type(node).__name__}")
    return node


def get_stmt_span(stmt: Any) -> Span | None:
    """The span of a statement, None if it is not known."""
    return _checked(stmt, Stmt, "a statement").span


def set_stmt_span(stmt: Any, span: Span | None) -> Any:
    """Set the span of a statement.  Returns the statement."""
    object.__setattr__(_checked(stmt, Stmt, "a statement"), "span", span)
    return stmt


def get_buffer_span(buffer: Any) -> Span | None:
    """The span of the declaration of a buffer, None if it is not known."""
    return _checked(buffer, Buffer, "a buffer").span


def set_buffer_span(buffer: Any, span: Span | None) -> Any:
    """Set the span of the declaration of a buffer.  Returns the buffer."""
    object.__setattr__(_checked(buffer, Buffer, "a buffer"), "span", span)
    return buffer


def _func(func: Any) -> Func:
    found = getattr(func, "func", func)
    if not isinstance(found, Func):
        raise TypeError(f"a PrimFunc is expected, found {type(func).__name__}")
    return found


def get_prim_func_span(func: Any) -> Span | None:
    """The span of a program's function, or else of its first statement that has a span."""
    program = _func(func)
    spans = (n.span for n in walk(program.body) if isinstance(n, Stmt) and n.span is not None)
    return getattr(program, "span", None) or next(spans, None)


def span_to_location(span: Span | None) -> tuple[str, int] | None:
    """(file, line) of a span; None if span is None."""
    return None if span is None else (span.file, span.line)


def span_coverage(func: Any) -> float:
    """The fraction of a program's statements that have a span, 0 to 1; 1 for a program without statements."""
    known = [n.span is not None for n in walk(_func(func).body) if isinstance(n, Stmt)]
    return sum(known) / len(known) if known else 1.0
