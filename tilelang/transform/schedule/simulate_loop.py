"""Simulates the steady iterations of a loop: warp groups, tensor cores, loads into rings, barriers; gives cycles an iteration.

Each warp group runs the events in order.  A GEMM takes its turn on the tensor cores, which all groups of an SM share.  The
warps of one group do not fill the arithmetic units, so groups that compute at the same time seldom wait for each other: a
group takes the time of the whole tile for its share of it.  A stage of a ring is loaded once all groups have released it;
loads follow each other at the rate of L2.  Where groups pass tiles through shared memory, all of them meet at a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilelang.target.machine import UNIT_RATES

if TYPE_CHECKING:
    from .loop_order import Event, Held, LoopItems, Wait

START = 40.0  # cycles to start a GEMM and to wait for it, beside its own
_ROUNDS = 10  # simulated iterations
_STEADY = 5  # the first of those that are measured


class Simulation:
    """One run of `groups` warp groups.  events, waits: of the steady iteration."""

    def __init__(self, loop: LoopItems, events: Sequence[Event], waits: dict[int, Wait], groups: int) -> None:
        self.loop, self.events, self.waits, self.groups = loop, events, waits, groups
        self.size = len(events)
        self.held: list[Held] = [loop.held(events, waits, x) for x in loop.rings]
        self.slow = 1.0 if loop.groups > 1 else 1 / UNIT_RATES.one_group
        self.clock, self.place = [0.0] * groups, [0] * groups
        self.tensor = self.bus = 0.0
        self.ends: list[dict[tuple[int, int], float]] = [{} for _ in range(groups)]
        self.released: list[dict[int, list[float]]] = [{} for _ in loop.rings]  # ring -> iteration -> times of the groups
        self.arrived: list[list[float]] = [[] for _ in loop.rings]
        self.order = sorted(range(len(loop.rings)), key=lambda k: (events[self.held[k].first].stage, self.held[k].first))
        self.uses: dict[int, list[int]] = {}
        self.frees: dict[tuple[int, bool], list[int]] = {}
        for k, h in enumerate(self.held):
            self.uses.setdefault(h.first, []).append(k)
            self.frees.setdefault((h.end, h.waited), []).append(k)

    def cycles(self) -> float:
        """Cycles of a steady iteration."""
        marks: list[float] = []
        while len(marks) < _ROUNDS:
            least = min(self.place)
            if all(x == least for x in self.place) and self.events[least % self.size].item in self.loop.exchanged:
                self.clock = [max(self.clock)] * self.groups
            g = min((x for x in range(self.groups) if self.ready(x, least)), key=self.clock.__getitem__)
            self.step(g)
            if min(self.place) >= (len(marks) + 1) * self.size:
                marks.append(max(self.clock))
        return (marks[-1] - marks[_STEADY - 1]) / (_ROUNDS - _STEADY)

    def ready(self, g: int, least: int) -> bool:
        """Whether what the next event of a group waits for is known."""
        turn, q = divmod(self.place[g], self.size)
        if self.place[g] > least and self.events[q].item in self.loop.exchanged:
            return False
        return all(self.arrival(k, turn) is not None for k in self.uses.get(q, ()))

    def arrival(self, ring: int, turn: int) -> float | None:
        """When the stage that is first used in an iteration is full; None while its release is not known."""
        while len(self.arrived[ring]) <= turn:
            t = min(map(len, self.arrived))
            for k in self.order:
                if len(self.arrived[k]) > t:
                    continue
                use, before = self.loop.rings[k], t - self.loop.rings[k].stages
                free = [0.0] if before < 0 else self.released[k].get(before, [])
                if before >= 0 and len(free) < self.groups:
                    return None
                self.bus = max(self.bus, *free) + use.bytes / UNIT_RATES.l2
                self.arrived[k].append(self.bus + UNIT_RATES.latency)
        return self.arrived[ring][turn]

    def step(self, g: int) -> None:
        """Runs the next event of a group."""
        turn, q = divmod(self.place[g], self.size)
        self.wait(g, q, turn)
        for k in self.uses.get(q, ()):
            self.clock[g] = max(self.clock[g], self.arrival(k, turn) or 0.0)
        cost = self.loop.cost[self.events[q].item]
        if self.events[q].item in self.loop.gemms:
            self.tensor = max(self.tensor, self.clock[g]) + cost.tensor / self.loop.groups
            self.ends[g][q, turn] = self.tensor
            self.clock[g] += START
        else:
            self.clock[g] += cost.ordinary * self.slow
        self.free(g, q, turn, False)
        self.place[g] += 1
        if q == self.size - 1:
            self.wait(g, self.size, turn)

    def wait(self, g: int, q: int, turn: int) -> None:
        w = self.waits.get(q)
        if w is not None:
            for p, back in (*((p, 0) for p in w.done), *((p, 1) for p in w.carried)):
                self.clock[g] = max(self.clock[g], self.ends[g].get((p, turn - back), 0.0))
            self.free(g, q, turn, True)

    def free(self, g: int, q: int, turn: int, waited: bool) -> None:
        for k in self.frees.get((q, waited), ()):
            self.released[k].setdefault(turn - self.held[k].lag, []).append(self.clock[g])


__all__ = ["START", "Simulation"]
