"""Spans: source locations.  Every node has one; comparison ignores it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A location in a user's file.

    file: path as Python reports it.  line, end_line: 1-based.  col, end_col: 0-based, end exclusive.
    function: name of the function that contains it.  caller: the span of the call of that function (macro, helper), if any.
    """

    file: str
    line: int
    col: int = 0
    end_line: int = 0
    end_col: int = 0
    function: str = ""
    caller: Span | None = None

    def chain(self) -> list[Span]:
        """This span, then those of its callers, innermost first."""
        out: list[Span] = []
        at: Span | None = self
        while at is not None:
            out.append(at)
            at = at.caller
        return out

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.col + 1}"
