"""Vector clocks of warps, mbarriers and named barriers for the synchronisation model.

Each component of a clock counts the events of one kind of actor: the ordinary accesses of a warp's lanes, the copies that
signal an mbarrier, the MMAs of a warp group, the bulk stores of a thread, the phases of a barrier.  The row of a warp says
up to which time it has seen each component (happens-before).  The verdict does not depend on the order in which the model
runs the warps.  A wait passes at the earliest phase that the waiter's own knowledge allows.  It is a fault if another order
of events could let the wait miss that phase, or count an arrival in another phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sync_fault import Crowded, Fault, Found

Row = np.ndarray  # time by component, 0: nothing seen


def join(into: Row, other: Row) -> None:
    """Merge another row into `into`: the later time of each component."""
    np.maximum(into, other, out=into)


class Clocks:
    """The current time of every component.  size: upper limit of the number of components.

    Whoever knows time t of a component has seen the component's event at t.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.now: list[int] = []
        self.asynchronous = np.ones(size, np.int32)  # 0 for the components of ordinary accesses
        self.landing: list[int] = []  # components of cp.async that signal an mbarrier, which those who wait for it may fence

    def row(self) -> Row:
        """The row of an actor that has seen nothing."""
        return np.zeros(self.size, np.int32)

    def new(self, ordinary: bool = False) -> int:
        """Add a component, whose time starts at 1."""
        if len(self.now) == self.size:
            raise Crowded("too many threads act on their own")
        self.now.append(1)
        self.asynchronous[len(self.now) - 1] = not ordinary
        return len(self.now) - 1


class Warp:
    """The lanes of a warp.  Rows are kept per set of lanes (bits of a mask) that learned them together.

    seen: what is ordered before.  fenced: of this, the ordinary accesses whose thread has fenced since: stores that the async
    proxy sees, and completed loads.
    """

    def __init__(self, clocks: Clocks, number: int, lanes: int, name: str) -> None:
        self.clocks, self.number, self.name = clocks, number, name
        self.full = (1 << lanes) - 1
        self.seen: dict[int, Row] = {self.full: clocks.row()}
        self.fenced: dict[int, Row] = {self.full: clocks.row()}
        self.own: dict[int, int] = {}  # lanes -> component of their ordinary accesses
        self._within: dict[int, set[int]] = {}  # own_components
        self.gone = 0  # lanes that have returned
        self.control = clocks.new()  # component of its waits

    def component(self, lanes: int) -> int:
        """The component of the ordinary accesses that these lanes make together."""
        c = self.own.get(lanes)
        if c is None:
            c = self.own[lanes] = self.clocks.new(True)
            self._within.clear()
        return c

    def own_components(self, lanes: int) -> set[int]:
        """The components of what these lanes did, by themselves or together."""
        got = self._within.get(lanes)
        if got is None:
            got = self._within[lanes] = {c for m, c in self.own.items() if m & lanes == m}
        return got

    def known(self, lanes: int) -> tuple[Row, Row]:
        """(seen, fenced) common to all of these lanes; the caller must not change the rows."""
        if len(self.seen) == 1:
            return self.seen[self.full], self.fenced[self.full]
        seen, fenced = self.clocks.row(), self.clocks.row()
        for m, row in self.seen.items():
            if m & lanes == lanes:
                join(seen, row)
                join(fenced, self.fenced[m])
        return seen, fenced

    def _rows(self, lanes: int) -> tuple[Row, Row]:
        if lanes not in self.seen:
            self.seen[lanes], self.fenced[lanes] = self.clocks.row(), self.clocks.row()
        return self.seen[lanes], self.fenced[lanes]

    def learn(self, lanes: int, seen: Row, fenced: Row | None = None) -> None:
        """Add a row to the knowledge of these lanes."""
        a, b = self._rows(lanes)
        join(a, seen)
        if fenced is not None:
            join(b, fenced)

    def learn_times(self, lanes: int, times: dict[int, int]) -> None:
        """Add times of components to the knowledge of these lanes."""
        a, _ = self._rows(lanes)
        for c, t in times.items():
            a[c] = max(a[c], t)

    def mine(self, lanes: int) -> tuple[Row, Row]:
        """The accesses that these lanes know, including their own, which they publish when they arrive at a barrier."""
        seen, fenced = self.known(lanes)
        seen = seen.copy()
        for c in self.own_components(lanes):
            seen[c] = self.clocks.now[c]
        if lanes == self.full:
            seen[self.control] = self.clocks.now[self.control]
        return seen, fenced

    def publish(self, lanes: int) -> tuple[Row, Row]:
        """Everything that any of these lanes knows and did so far; their later accesses are not included."""
        seen, fenced = self.mine(lanes)
        fenced = fenced.copy()
        for m, row in self.seen.items():
            if m != lanes and m & lanes == m:
                join(seen, row)
                join(fenced, self.fenced[m])
        for c in self.own_components(lanes):
            self.clocks.now[c] += 1
        return seen, fenced

    def aligned(self, lanes: int) -> None:
        """These lanes execute a `.sync.aligned` instruction: none continues before all have passed their earlier waits.

        It orders no memory.
        """
        if lanes == self.full:
            self.seen[lanes][self.control] = self.clocks.now[self.control]
            self.clocks.now[self.control] += 1

    def converge(self, lanes: int) -> None:
        """These lanes have waited for each other."""
        self.aligned(lanes)
        seen, fenced = self._rows(lanes)
        for m in [m for m in self.seen if m != lanes and m & lanes == m]:
            join(seen, self.seen.pop(m))
            join(fenced, self.fenced.pop(m))
        for c in self.own_components(lanes):
            seen[c] = self.clocks.now[c]
            self.clocks.now[c] += 1

    def fence(self, lanes: int) -> None:
        """fence.proxy.async: the async proxy sees what these lanes wrote before."""
        _, fenced = self._rows(lanes)
        for c in self.own_components(lanes):
            fenced[c] = self.clocks.now[c]
            self.clocks.now[c] += 1
        if self.clocks.landing:
            seen, _ = self.known(lanes)
            for c in self.clocks.landing:
                fenced[c] = max(fenced[c], seen[c])


Active = list[tuple[Warp, int]]  # warps and lanes that execute something


@dataclass
class MBarrier:
    """The phases of an mbarrier: arrivals and bytes, who waited for which phase, what a completed phase has seen.

    fenced: copies see its initialisation.  released: other blocks see it behind a relaxed cluster barrier.  doubt: an arrival
    that may belong to two phases, a fault as soon as something waits; waited: whether something did.
    """

    name: str
    count: int
    clocks: Clocks
    made: tuple[int, int]  # component and time of its initialisation
    initialiser: Any
    fenced: bool = False
    released: bool = False
    done: list[tuple[Row, Row]] = field(default_factory=list)
    doubt: Found | None = None
    waited: bool = False

    def __post_init__(self) -> None:
        self.pending, self.tx = self.count, 0
        self.phase, self.copies = self.clocks.new(), self.clocks.new()
        self.clocks.now[self.copies] = 0
        self.seen, self.shown = self.clocks.row(), self.clocks.row()
        self.landing = -1  # component of cp.async that signal it
        self.waits: list[tuple[int, int, int, Any]] = []  # phases completed, component and time of the waiter, span
        self.last_copy: Any = None

    def check_made(self, seen: Row, remote: bool, span: Any) -> None:
        """Raises Found unless the initialisation has been seen."""
        if seen[self.made[0]] < self.made[1]:
            raise Found(Fault(f"{self.name} is used by threads that do not see its initialisation", span,
                              self.initialiser, kind="mbarrier"))
        if remote and not self.fenced:
            raise Found(Fault(f"copies signal {self.name} without a fence_mbarrier_init after its initialisation", span,
                              self.initialiser, kind="mbarrier"))

    def current(self, seen: Row, span: Any, what: str) -> None:
        """Raises Found unless an arrival can only belong to the current phase, or nothing waits for this mbarrier."""
        if seen[self.phase] != len(self.done) and self.doubt is None:
            self.doubt = Found(Fault(f"{what} on {self.name} may come before phase {len(self.done) - 1} is over: nothing "
                                     "orders it after that", span, kind="mbarrier"))
        if self.doubt is not None and self.waited:
            raise self.doubt

    def arrive(self, warp: Warp, lanes: int, n: int, tx: int, span: Any) -> None:
        """Record n arrivals of these lanes, which also announce tx bytes."""
        seen, fenced = warp.publish(lanes)
        self.check_made(seen, False, span)
        self.current(seen, span, "an arrival" if n else "mbarrier_expect_tx")
        over = self._over(n, span)
        self.pending -= n - over
        self.tx += tx
        join(self.seen, seen)
        join(self.shown, fenced)
        self.settle(span)
        self.pending -= over

    def _over(self, n: int, span: Any) -> int:
        """Of n arrivals those that already belong to the next phase.  Raises Found."""
        over = max(n - self.pending, 0)
        if over and (self.doubt is None or n > self.count):
            raise Found(Fault(f"{n} threads arrive on {self.name} in phase {len(self.done)}, which needs {self.pending} "
                              f"more of {self.count} arrivals", span, kind="mbarrier"))
        return over

    def land(self, active: Active, arrive: bool, span: Any) -> tuple[int, int]:
        """Record that cp.async of these lanes land in this phase, which count as arrivals or only delay its end; returns
        (component, time) for whoever sees the phase."""
        if self.landing < 0:
            self.landing = self.clocks.new()
            self.clocks.landing.append(self.landing)
        for warp, lanes in active:
            seen, _ = warp.mine(lanes)
            self.check_made(seen, False, span)
            self.current(seen, span, "an arrival of copies")
            join(self.seen, seen * self.clocks.asynchronous)
            self.pending -= lanes.bit_count() - self._over(lanes.bit_count(), span) if arrive else 0
        self.clocks.now[self.landing] += 1
        self.seen[self.landing] = self.clocks.now[self.landing]
        return self.landing, self.clocks.now[self.landing]

    def copy(self, seen: Row, nbytes: int, span: Any) -> int:
        """Record a copy that signals this mbarrier and counts its bytes at once; returns its time in component `copies`."""
        self.check_made(seen, True, span)
        self.current(seen, span, "a copy")
        self.clocks.now[self.copies] += 1
        t = self.clocks.now[self.copies]
        # Whoever sees the copy also sees everything ordered before its issue, but it makes no ordinary accesses visible.
        join(self.seen, seen * self.clocks.asynchronous)
        self.last_copy = span
        self.seen[self.copies] = t
        self.tx -= nbytes
        return t

    def settle(self, span: Any) -> None:
        """Go to the next phase if the current one is complete."""
        if self.pending or self.tx:
            return
        after = len(self.done) + 1
        self.seen[self.phase] = after
        for target, c, t, where in self.waits:
            if target == after - 1 and self.seen[c] < t:
                raise Found(Fault(f"{self.name} may go on to phase {after} before a wait for the end of phase "
                                  f"{after - 2} has seen it", where, span, kind="mbarrier"))
        self.waits = [w for w in self.waits if w[0] >= after]
        self.done.append((self.seen, self.shown))
        self.seen, self.shown = self.clocks.row(), self.clocks.row()
        self.pending, self.tx = self.count, 0

    def target(self, seen: Row, parity: int) -> int:
        """Number of completed phases with which a wait for this parity passes at the earliest."""
        known = int(seen[self.phase])
        return known if (known + 1) % 2 == parity % 2 else known + 1

    def wait(self, warp: Warp, lanes: int, target: int, span: Any) -> None:
        """These lanes pass the wait for the end of phase `target` - 1."""
        self.waited = True
        if self.doubt is not None:
            raise self.doubt
        if target < len(self.done):
            raise Found(Fault(f"{self.name} may be in phase {len(self.done)} before a wait for the end of phase "
                              f"{target - 1} has seen it", span, kind="mbarrier"))
        c = warp.control if lanes == warp.full else warp.component(lanes)
        if target:
            warp.learn(lanes, *self.done[target - 1])
        self.waits.append((target, c, self.clocks.now[c], span))

    def state(self) -> str:
        """The state in words, for messages."""
        more = f"{self.tx} bytes still expected" if self.tx >= 0 else f"{-self.tx} bytes more than expected"
        return f"{self.name} in phase {len(self.done)}: {self.pending} of {self.count} arrivals pending, {more}"


class NamedBarrier:
    """A named barrier (bar.sync and bar.arrive on one number); sync_threads is number 0."""

    def __init__(self, name: str, clocks: Clocks) -> None:
        self.name, self.clocks = name, clocks
        self.component = clocks.new()  # component that counts its phases
        self.phase, self.count, self.arrived, self.left = 0, 0, 0, 0
        self.seen, self.shown = clocks.row(), clocks.row()
        self.done: dict[int, tuple[Row, Row]] = {}

    def arrive(self, active: Active, threads: int, count: int, span: Any, only: Row | None = None) -> int:
        """Record an arrival and return its phase; raises Found when it could belong to another phase.

        only: what a relaxed arrival makes known, instead of everything that its threads have seen.
        """
        if self.arrived and count != self.count:
            raise Found(Fault(f"{self.name} is used for {count} threads while {self.count} are expected", span, kind="named"))
        self.count = count
        for warp, lanes in active:
            seen, fenced = warp.publish(lanes | warp.gone)
            if seen[self.component] != self.phase:
                raise Found(Fault(f"a warp may arrive at {self.name} before its phase {self.phase - 1} is over", span,
                                  kind="named"))
            join(self.seen, seen if only is None else only)
            if only is None:
                join(self.shown, fenced)
        self.arrived += threads
        if self.arrived > count:
            raise Found(Fault(f"{self.arrived} threads arrive at {self.name}, which is for {count}", span, kind="named"))
        phase = self.phase
        self._settle()
        return phase

    def leave(self, threads: int) -> None:
        """Threads return: no phase waits for them any more."""
        self.left += threads
        if self.arrived:
            self._settle()

    def _settle(self) -> None:
        if self.arrived + self.left == self.count:
            self.done[self.phase] = self.seen, self.shown
            self.phase, self.arrived = self.phase + 1, 0
            self.seen[self.component] = self.phase
            self.seen, self.shown = self.clocks.row(), self.clocks.row()

    def pass_(self, active: Active, phase: int) -> None:
        """These warps continue after a phase."""
        for warp, lanes in active:
            lanes |= warp.gone
            warp.learn(lanes, *self.done[phase])
            if lanes == warp.full:
                warp.converge(lanes)

    def state(self) -> str:
        """The state in words, for messages."""
        return f"{self.name}: {self.arrived} of {self.count} threads have arrived"
