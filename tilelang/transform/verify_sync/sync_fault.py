"""What the checks of synchronisation report."""

from __future__ import annotations

from typing import Any

from tilelang.ir.record import record



@record
class Fault:
    """A pair that is not ordered, a barrier that not all threads reach, a deadlock.

    span, other: where, and where the other access is.  exact: everything it depends on was known, so that the program
    is wrong; otherwise it may be.
    """

    message: str
    span: Any
    other: Any = None
    exact: bool = True
    stuck: bool = False  # nobody can go on


class Found(Exception):
    """Carries a Fault out of the walk that met it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault

    def under(self, span: Any) -> Found:
        """Itself; a fault of a statement without a place is told at the one around it."""
        if self.fault.span is None and span is not None:
            f = self.fault
            self.fault = Fault(f.message, span, f.other, f.exact, f.stuck)
        return self


class Undecided(Exception):
    """Why a program cannot be followed: its synchronisation depends on data."""


class Crowded(Undecided):
    """More parts of warps act on their own than a model has room for: one with more room may follow the program."""


__all__ = ["Crowded", "Fault", "Found", "Undecided"]
