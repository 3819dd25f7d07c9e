"""Counters of an mbarrier: phases, arrivals and transaction bytes.  Both simulators use them.

Source: PTX ISA, "Parallel synchronization and communication instructions: mbarrier".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .faults import fault


def arrivals(n: Any, span: Any) -> int:
    """The count of an mbarrier.  Raises sim-mbarrier for a number that it cannot count."""
    if not 1 <= n < 1 << 20:
        raise fault("sim-mbarrier", f"an mbarrier counts «1 to {(1 << 20) - 1} arrivals», found {n}", span=span)
    return int(n)


@dataclass
class Phases:
    """State of an mbarrier.

    phase: number of the current phase.  pending: arrivals that the phase still needs.  tx: bytes it still expects (negative
    when a copy has arrived before its bytes were announced).
    """

    name: str
    count: int
    phase: int = 0
    pending: int = 0
    tx: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Whether a wait on this parity passes: the last completed phase has that parity."""
        return self.phase % 2 != parity % 2

    def arrive(self, n: int, span: Any) -> None:
        """Count n arrivals.  Raises sim-mbarrier when the phase needs fewer."""
        if n > self.pending:
            raise fault("sim-mbarrier", f"{self.name}: ‹{n}› threads arrive in phase {self.phase}, which needs {self.pending} "
                        f"more of {self.count} arrivals", expected=f"at most {self.pending} arrivals in this phase", span=span,
                        hint="the count of an mbarrier is the number of threads that arrive in one phase")
        self.pending -= n
        self.settle()

    def receive(self, nbytes: int) -> None:
        """Bytes of copies have arrived."""
        self.tx -= nbytes
        self.settle()

    def settle(self) -> bool:
        """Go to the next phase when no arrivals and no bytes are missing."""
        if self.pending or self.tx:
            return False
        self.phase, self.pending = self.phase + 1, self.count
        return True

    def state(self) -> str:
        """Description of the state for messages."""
        bytes_ = (f"{self.tx} bytes still expected" if self.tx >= 0 else f"{-self.tx} bytes more than expected")
        return f"{self.name} in phase {self.phase}: {self.pending} of {self.count} arrivals pending, {bytes_}"
