"""Simulates the steady iterations of a loop: warp groups, tensor cores, loads into rings, barriers; gives cycles an iteration.

Each warp group runs the events in order.  A GEMM waits for the tensor cores, which all groups of an SM use.  The
warps of one group do not fill the arithmetic units, so groups that compute at the same time seldom wait for each other: a
group takes the time of the whole tile for its rows of it.  A stage of a ring is loaded once all groups have released it;
loads follow each other at the rate of tiles that neighbours load too, and each takes the time of a tile that no neighbour
loads.  Where groups pass tiles through shared memory, all of them meet at a barrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilelang.ir.record import record
from tilelang.target.machine import UNIT_RATES

START = 40.0  # cycles to start a GEMM and to wait for it, beside its own
_MOST = 256  # simulated iterations of a loop that does not become periodic


@record
class Event:
    """An item in a steady iteration, with its stage: it works on the iteration that began `stage` iterations before."""

    item: int
    stage: int


@record
class Wait:
    """A wait in a sequence of events: at most `pending` later groups of wgmma stay in flight.

    done: the events (as places in the sequence) whose GEMMs are complete after it; carried: those of the iteration before.
    """

    pending: int
    done: tuple[int, ...]
    carried: tuple[int, ...] = ()


@record
class RingUse:
    """A ring of stages: the items that use a stage, its bytes, and the number of stages.

    rate: bytes that are loaded a cycle.  latency: cycles until the first arrive.  wait: cycles to find a stage full.
    """

    users: frozenset[int]
    bytes: int
    stages: int
    rate: float = UNIT_RATES.loads
    latency: float = UNIT_RATES.latency
    wait: float = 0.0


@record
class Held:
    """How long a stage is in use: from the event at place `first` to `lag` iterations later.

    It is free behind the event at `place`, or where the GEMM of that event is waited for (`waited`), at place `end`.
    released: orders stages by that time.
    """

    first: int
    lag: int
    place: int
    waited: bool
    end: int
    released: tuple[int, int, bool]


class Simulation:
    """One run of a loop.  cycles: of its steady iteration, which no unit is busy for longer.

    ran: (group, place) -> when its last event began and ended, a GEMM on the tensor cores.  loaded: the same of each ring's
    loads, by place in `rings`.

    events, waits: of the steady iteration.  tensor: place of a GEMM -> its cycles on the tensor cores, for one group.
    ordinary: cycles of each event beside.  meets: places of events in front of which all groups meet.  rings: with how long
    their stages are in use.  delays: of predictions, UnitRates' drain and meet; orders are compared without.
    """

    def __init__(self, events: Sequence[Event], waits: dict[int, Wait], tensor: dict[int, float], ordinary: Sequence[float],
                 meets: set[int], rings: Sequence[tuple[RingUse, Held]], groups: int, delays: bool = False) -> None:
        self.drain, self.meet = delays * UNIT_RATES.drain, delays * UNIT_RATES.meet
        self.size, self.waits, self.cost, self.ordinary, self.meets = len(events), waits, tensor, ordinary, meets
        self.rings = sorted(rings, key=lambda x: x[1].released)  # in the order of their loads
        self.uses: dict[int, list[int]] = {}
        self.frees: dict[tuple[int, bool], list[int]] = {}
        for k, (_, h) in enumerate(self.rings):
            self.uses.setdefault(h.first, []).append(k)
            self.frees.setdefault((h.end, h.waited), []).append(k)
        self.groups, self.tensor, self.bus = groups, 0.0, 0.0
        self.clock, self.place = [0.0] * groups, [0] * groups
        self.ends: list[dict[tuple[int, int], float]] = [{} for _ in range(groups)]
        self.released: list[dict[int, list[float]]] = [{} for _ in self.rings]  # ring -> iteration -> times of the groups
        self.arrived: list[list[float]] = [[] for _ in self.rings]
        self.ran: dict[tuple[int, int], tuple[float, float]] = {}
        self.loaded: dict[int, tuple[float, float]] = {}
        self.busy = max(groups * sum(tensor.values()), sum(use.bytes / use.rate for use, _ in self.rings))
        self.cycles = self.run()
        assert self.cycles > self.busy - 0.01, f"{self.cycles} cycles of an iteration, but a unit is busy for {self.busy}"

    def run(self) -> float:
        """Cycles of a steady iteration: the mean over a period, which ends in the state it began in, or half of the run."""
        marks: list[float] = []
        first = max((use.stages for use, _ in self.rings), default=0) + 1  # stages that are free from the start are used up
        seen: dict[tuple[float, ...], list[tuple[int, Any]]] = {}  # clocks -> (iterations so far, state)
        while len(marks) < _MOST:
            least = min(self.place)
            if least % self.size in self.meets and max(self.place) == least:
                self.clock = [max(self.clock) + self.meet] * self.groups
            able = [x for x in range(self.groups) if self.ready(x, least)] if self.groups > 1 else [0]
            g = min(able, key=self.clock.__getitem__)
            self.run_event(g)
            if min(self.place) < (len(marks) + 1) * self.size:
                continue
            marks.append(max(self.clock))
            if len(marks) >= first:
                before = seen.setdefault(tuple(round(x - marks[-1], 3) for x in self.clock), [])
                now = self.state(len(marks), marks[-1])
                begin = next((n for n, state in before if state == now), None)
                if begin is not None:
                    return (marks[-1] - marks[begin - 1]) / (len(marks) - begin)
                before.append((len(marks), now))
        # No state came again: a span that begins behind a longer iteration may be shorter than the work in it.
        return max(self.busy, (marks[-1] - marks[_MOST // 2 - 1]) / (_MOST // 2))

    def state(self, steps: int, now: float) -> Any:
        """What the rest of the run depends on after so many iterations of all groups, with times from `now` on."""
        free = [(t - steps, sorted(times)) for (use, _), arrived, released in zip(self.rings, self.arrived, self.released)
                for t, times in released.items() if t >= len(arrived) - use.stages]
        first = min(*self.clock, *(x for _, times in free for x in times), now)  # what ended earlier delays nothing

        def since(times: Iterable[float]) -> tuple[float, ...]:
            return tuple(round(max(t, first) - now, 3) for t in times)

        return (tuple(n - steps * self.size for n in self.place), since((*self.clock, self.tensor, self.bus)),
                [since(t for (_, step), t in ends.items() if step >= steps - 1) for ends in self.ends],
                [since(times[steps:]) for times in self.arrived], [(t, since(times)) for t, times in free])

    def ready(self, g: int, least: int) -> bool:
        """Whether what the next event of a group waits for is known."""
        step, q = divmod(self.place[g], self.size)
        if self.place[g] > least and q in self.meets:
            return False
        return q not in self.uses or all(self.arrival(k, step) is not None for k in self.uses[q])

    def arrival(self, ring: int, step: int) -> float | None:
        """When the stage that is first used in an iteration is full; None while its release is not known."""
        while len(self.arrived[ring]) <= step:
            t = min(map(len, self.arrived))
            for k, (use, _) in enumerate(self.rings):
                if len(self.arrived[k]) > t:
                    continue
                before = t - use.stages
                free = [0.0] if before < 0 else self.released[k].get(before, [])
                if before >= 0 and len(free) < self.groups:
                    return None
                begun, self.bus = max(self.bus, *free), max(self.bus, *free) + use.bytes / use.rate
                self.arrived[k].append(begun + use.bytes / min(use.rate, UNIT_RATES.alone) + use.latency)
                self.loaded[k] = begun, self.arrived[k][-1]
        return self.arrived[ring][step]

    def run_event(self, g: int) -> None:
        """Runs the next event of a group."""
        step, q = divmod(self.place[g], self.size)
        self.wait(g, q, step)
        for k in self.uses.get(q, ()):
            self.clock[g] = max(self.clock[g], self.arrival(k, step) or 0.0) + self.rings[k][0].wait
        if q in self.cost:
            begin = max(self.tensor, self.clock[g])
            end = self.tensor = begin + self.cost[q]
            self.ends[g][q, step] = end + self.drain
            self.clock[g] += START
        else:
            begin, end = self.clock[g], self.clock[g] + self.ordinary[q]
            self.clock[g] = end
        self.ran[g, q] = begin, end
        self.free(g, q, step, False)
        self.place[g] += 1
        if q == self.size - 1:
            self.wait(g, self.size, step)

    def wait(self, g: int, q: int, step: int) -> None:
        w = self.waits.get(q)
        if w is not None:
            for p, back in (*((p, 0) for p in w.done), *((p, 1) for p in w.carried)):
                self.clock[g] = max(self.clock[g], self.ends[g].get((p, step - back), 0.0))
            self.free(g, q, step, True)

    def free(self, g: int, q: int, step: int, waited: bool) -> None:
        for k in self.frees.get((q, waited), ()):
            self.released[k].setdefault(step - self.rings[k][1].lag, []).append(self.clock[g])


@record
class Usage:
    """What an event of a block takes: cycles of units that all blocks of the SM share, and cycles until its results are there.

    behind: the event whose load it waits for, and the cycles from the end of that one on.  is_async: warps go on at once.
    """

    units: tuple[tuple[str, float], ...]
    latency: float = 0.0
    behind: tuple[int, float] | None = None
    is_async: bool = False


class Blocks(Simulation):
    """Blocks whose warps wait for each matrix instruction's results, where these run while the warps of other blocks go on.

    Each group is a block.  An event uses each of its units once the unit is free of the events that came before; the block goes
    on when the slowest is done.
    """

    def __init__(self, events: Sequence[Event], usage: Sequence[Usage], groups: int) -> None:
        self.usage, self.until = usage, {u: 0.0 for x in usage for u, _ in x.units}
        self.took: list[dict[int, float]] = [{} for _ in range(groups)]
        super().__init__(events, {}, {}, [0.0] * len(events), set(), (), groups)
        busy = {u: groups * sum(dict(x.units).get(u, 0.0) for x in usage) for u in self.until}
        self.cycles = max(self.cycles, *busy.values(), 0.0)  # of loads that no event waits for, only the unit is a bound

    def run_event(self, g: int) -> None:
        q = self.place[g] % self.size
        use = self.usage[q]
        first, latency = use.behind or (-1, 0.0)
        begin = end = max(self.clock[g], self.took[g].get(first, -latency) + latency)
        for u, cycles in use.units:
            self.until[u] = max(begin, self.until[u]) + cycles
            end = max(end, self.until[u])
        self.took[g][q] = end
        self.clock[g] = (begin if use.is_async else end) + use.latency
        self.ran[g, q] = begin, max(end, self.clock[g])
        self.place[g] += 1

    def state(self, steps: int, now: float) -> Any:
        loads = {x.behind[0] for x in self.usage if x.behind}
        return (super().state(steps, now), [round(max(t, min(self.clock)) - now, 3) for t in self.until.values()],
                [[round(max(took.get(q, 0.0), now - 4096) - now, 3) for q in loads] for took in self.took])
