"""Source places of programs, by name: reading and setting the span of statements and buffers.

A span is no part of a node's value (comparison and hash leave it out), which is why setting one changes the node itself.
"""

from __future__ import annotations

from typing import Any

from .buffer import Buffer
from .span import Span
from .stmt import Func, Stmt
from .visitor import walk


def make_span(file: str, line: int, column: int = 0) -> Span:
    """A place: path, line from 1, column from 0."""
    return Span(str(file), int(line), int(column))


def _stmt(node: Any) -> Stmt:
    if not isinstance(node, Stmt):
        raise TypeError(f"a statement is expected, found {type(node).__name__}")
    return node


def _buffer(node: Any) -> Buffer:
    if not isinstance(node, Buffer):
        raise TypeError(f"a buffer is expected, found {type(node).__name__}")
    return node


def get_stmt_span(stmt: Any) -> Span | None:
    """Where a statement stands, None where that is not known."""
    return _stmt(stmt).span


def set_stmt_span(stmt: Any, span: Span | None) -> Any:
    """Say where a statement stands.  Returns the statement."""
    object.__setattr__(_stmt(stmt), "span", span)
    return stmt


def get_buffer_span(buffer: Any) -> Span | None:
    """Where a buffer was declared, None where that is not known."""
    return _buffer(buffer).span


def set_buffer_span(buffer: Any, span: Span | None) -> Any:
    """Say where a buffer was declared.  Returns the buffer."""
    object.__setattr__(_buffer(buffer), "span", span)
    return buffer


def _func(func: Any) -> Func:
    found = getattr(func, "func", func)
    if not isinstance(found, Func):
        raise TypeError(f"a PrimFunc is expected, found {type(func).__name__}")
    return found


def get_prim_func_span(func: Any) -> Span | None:
    """Where a program's function stands: its own place, else that of its first statement that has one."""
    program = _func(func)
    spans = (n.span for n in walk(program.body) if isinstance(n, Stmt) and n.span is not None)
    return getattr(program, "span", None) or next(spans, None)


def span_to_location(span: Span | None) -> tuple[str, int] | None:
    """(file, line) of a place, None of None."""
    return None if span is None else (span.file, span.line)


def span_coverage(func: Any) -> float:
    """The share of a program's statements that know their place, 0 to 1; 1 without statements."""
    known = [n.span is not None for n in walk(_func(func).body) if isinstance(n, Stmt)]
    return sum(known) / len(known) if known else 1.0


__all__ = ["get_buffer_span", "get_prim_func_span", "get_stmt_span", "make_span", "set_buffer_span", "set_stmt_span",
           "span_coverage", "span_to_location"]
