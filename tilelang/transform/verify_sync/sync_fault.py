"""Faults that the synchronisation checks report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang.ir.record import record


@record
class Fault:
    """A synchronisation error: an unordered pair of accesses, a barrier that not all threads reach, or a deadlock.

    span, other: of the access, and of the other access.  exact: everything that the fault depends on was known, so the program
    is wrong; otherwise it may be wrong.
    """

    message: str
    span: Any
    other: Any = None
    exact: bool = True
    stuck: bool = False  # no thread can continue
    kind: str = "order"  # what would mend it, a key of _ADVICE in check/verify_sync.py


class Found(Exception):
    """Carries a Fault out of the walk that found it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault

    def under(self, span: Any) -> Found:
        """This exception; a fault without a span gets the span of the enclosing statement."""
        if self.fault.span is None and span is not None:
            self.fault = replace(self.fault, span=span)
        return self


class Undecided(Exception):
    """The reason why a program cannot be followed: its synchronisation depends on data."""


class Crowded(Undecided):
    """More subsets of warps act on their own than a model has room for; one with more room may follow the program."""
