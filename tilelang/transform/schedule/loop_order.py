"""Chooses in which iteration and order the statements of a loop run, so that its GEMMs run under other work.

    for k: S = A B[k]; …S…; C += P V[k]       ->     S = A B[0]; …S…
                                                     for k >= 1: start S = A B[k]; start C += P V[k-1]; wait for S; …S…
                                                                 wait for C; what touches C or P
                                                     C += P V[last]

An item (a statement) runs in its own iteration (stage 0) or one iteration late (stage 1).  A candidate is a set of late GEMMs
with everything that must follow them.  In an iteration, a late item precedes the items of stage 0 that it conflicts with, and
the items of one stage keep their order where they conflict: so every candidate computes what the loop computes, which
`violations` checks again.  The order is found by list scheduling: a GEMM starts as soon as it can, and of the other items
comes first the one whose operands are complete first.  Candidates whose fragments do not fit the registers are dropped.
A simulation of all warp groups, which share the tensor cores and the arithmetic units, gives the cycles of an iteration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.ir.record import state
from tilelang.target.machine import REGISTERS

from ..analysis.loop_items import LoopItems, LoopOrder
from ..analysis.simulate_loop import Event, Wait

ENDED = 1.1  # weight of an order whose last GEMMs are waited for in each iteration: the tensor cores are idle then
# The same where metadata are loaded in front of each GEMM: 128 x 256 tiles at 4096x1024x8192 take 75 us, in flight 64.
ENDED_SPARSE = 1.3
_LATE = 1.001  # weight of an order with late items, which need a prologue and a drain
_PATH = 0.05  # weight of the cycles of one group without loads: where the tensor cores limit, the shorter path is steadier


def ended_weight(loop: LoopItems) -> float:
    """The weight of an order whose last GEMMs are waited for in each iteration."""
    return ENDED_SPARSE if any(loop.gemm(i).sparsity > 1 for i in loop.gemms) else ENDED


@state
class _Candidate:
    """An order that a loop may have: what it costs apart from loads.

    late: number of late items.  lags: for how many iterations it holds a stage of each ring.  weight: of its cycles.
    """

    late: int
    events: tuple[Event, ...]
    waits: dict[int, Wait]
    carry: bool
    registers: int
    lags: tuple[int, ...]
    weight: float
    path: float = 0.0  # of one group alone, once it is asked for


class Search:
    """The search for the best order of a loop: over orders, numbers of stages, and versions of operands that threads make.

    flight: the value of tl.wgmma_in_flight.  What an order costs apart from loads is found once for all numbers of stages.
    """

    def __init__(self, flight: str = "iterations") -> None:
        self.flight = flight
        self.made: dict[Any, list[_Candidate]] = {}
        self.found: dict[Any, LoopOrder] = {}

    def best(self, loop: LoopItems, registers: int) -> LoopOrder:
        """The order that the program gives if it fits, else that of least cycles.  registers: that a consumer thread may use.

        Where none fits beside the registers that such loops usually need, one that leaves the least is taken: the log of ptxas
        then decides.  The order of the program with a wait after each GEMM is left where no other one fits.
        """
        # By the items that use their tiles: equal for forms of a loop that differ in the names of tiles.
        versions = frozenset((n, frozenset(i for i in loop.own if loop.items[i].touches(x))) for x, n in loop.versions.items())
        key = versions, loop.rings, loop.beside, registers
        if versions not in self.made:
            self.made[versions] = [*self._candidates(loop)]
        if key not in self.found:
            fitting = (_least(loop, self.made[versions], registers - beside)
                       for beside in (REGISTERS.overlapped_gemms, REGISTERS.overlapped_least))
            events = tuple(Event(i, 0) for i in loop.own)
            self.found[key] = next(filter(None, fitting), None) or LoopOrder(
                events, 0.0, 0.0, loop.registers(events, loop.waits(events, True, False)), False)
        return self.found[key]

    def _candidates(self, loop: LoopItems) -> Iterable[_Candidate]:
        """The orders, each with the waits that it may have; the one that the program gives has least weight."""
        ended = ended_weight(loop)
        free, late_items = self.flight == "iterations", {
            "iterations": loop.candidates, "iteration": lambda: (frozenset(),), "statement": tuple}[self.flight]
        tried = dict.fromkeys((len(late), loop.ordered(late, at_once)) for late in late_items() for at_once in (True, False))
        asked = [(sum(e.stage for e in loop.asked), loop.asked)] if loop.asked and free else []
        for n, (late, events) in enumerate((*asked, *tried)):
            carried, waited = (loop.waits(events, True, carry) for carry in (True, False))
            for carry, waits in ((True, carried), (False, waited)):
                if (carry or waited != carried) if free else not carry:
                    weight = (1.0 if carry else ended) * (_LATE if late else 1.0) * (1.0 if n >= len(asked) else 1e-3)
                    yield _Candidate(late, events, waits, carry, loop.registers(events, waits),
                                     tuple(loop.held(events, waits, x).lag for x in loop.rings), weight)


def _least(loop: LoopItems, candidates: Iterable[_Candidate], registers: int) -> LoopOrder | None:
    """The order of least cycles, with weights, of those that fit the registers and the rings."""
    fit = [c for c in candidates if c.registers <= registers and all(n < x.stages for n, x in zip(c.lags, loop.rings))]
    busy, ranked = sum(c.tensor for c in loop.cost.values()), []
    for n, c in enumerate(fit):
        c.path = c.path or loop.simulated(c.events, c.waits, 1, ()).cycles
        # Other groups and loads do not shorten a group's path.
        ranked.append((max(busy, c.path / max(1, loop.beside)) * c.weight + c.path * _PATH, n))
    found: list[tuple[float, int, int, float]] = []
    for bound, n in sorted(ranked):
        c = fit[n]
        if found and bound > min(found)[0] + 0.01:
            break
        cycles = loop.simulated(c.events, c.waits, loop.groups, loop.rings).cycles
        if loop.beside > 1:  # other blocks of the SM run while this one waits
            cycles = max(busy, cycles / loop.beside)
        found.append((cycles * c.weight + c.path * _PATH, c.late, n, cycles))
    if not found:
        return None
    _, _, n, cycles = min(found)
    loop.checked(fit[n].events)
    return LoopOrder(fit[n].events, cycles, fit[n].path, fit[n].registers, fit[n].carry)
