"""State of a block in the reference interpreter: its warp roles, and how they synchronise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilelang.target.warp_groups import WARP_LANES, named

from ..coroutines import Coroutine, Scheduler
from ..faults import fault
from ..lanes import Action, LaneFrame
from ..mbarrier import Phases


@dataclass
class WarpRole:
    """Warps that run the same code.

    counts: by key, how often this warp role has reached something that warp roles share.  watch: accesses recorded in the
    statement that the warp roles currently execute one after another (watch.Watch).
    """

    number: int
    warps: tuple[int, ...]
    threads: int
    counts: dict[Any, int] = field(default_factory=dict)
    watch: Any = None

    @property
    def name(self) -> str:
        return named(self.warps)

    def mask(self, lanes: int) -> np.ndarray:
        return np.isin(np.arange(lanes) // WARP_LANES, self.warps)


@dataclass
class _Meeting:
    """Threads that synchronise at one place: how many have arrived, and whether the meeting is complete."""

    need: int
    come: int = 0
    done: bool = False
    warp_roles: dict[int, int] = field(default_factory=dict)  # awaited warp roles and their threads
    action: Callable[[], None] | None = None


class TileBlock:
    """State of one block of a tile program: its warp roles, the buffers they share, its mbarriers."""

    counters = SimpleNamespace(count=lambda *_: None)  # the reference interpreter counts no instructions
    base = 0  # first byte of its shared memory (device.block.Block)
    device = 0  # the rank of the program that runs it

    def __init__(self, printer: Any, where: str, warp: int = WARP_LANES) -> None:
        self.print, self.where, self.warp = printer.print, where, warp
        self.scheduler: TileScheduler | None = None
        self.shared: dict[tuple[Any, int], Any] = {}
        self.meetings: dict[Any, _Meeting] = {}
        self.over: set[int] = set()  # warp roles that have ended
        self.barriers: list[Phases] = []
        self.named: dict[int, list[Phases]] = {}  # mbarriers by id of their buffer
        self.cluster: Any = None  # cluster.TileCluster
        self.rank = 0
        self.stores: dict[int, Any] = {}  # shared memory by id of the buffer's data; `makers` create it for another block
        self.makers: dict[int, Callable[[LaneFrame], Any]] = {}

    def wait(self, until: Callable[[], bool], why: Callable[[], str], span: Any) -> None:
        """Wait until `until()` is true.  Raises sim-barrier if nothing can make it true."""
        if until():
            return
        if self.scheduler is None:
            raise fault("sim-barrier", f"the block waits for ever {why()}, in block {self.where}",
                        found="a block that waits for ever", span=span,
                        hint="nothing else runs in this block that could complete the barrier")
        self.scheduler.wait(until, why, span)

    def once(self, key: Any, warp_role: WarpRole, make: Callable[[], Any]) -> Any:
        """What `make` returned to the first warp role that reached this point; the other warp roles get the same object."""
        at = (key, nth(warp_role, key))
        if at not in self.shared:
            self.shared[at] = make()
        return self.shared[at]

    def gather(self, key: Any, warp_role: WarpRole, warp_roles: dict[int, int], span: Any, why: str,
               action: Callable[[], None] | None = None) -> None:
        """Wait for all of `warp_roles` (threads by number) that have not ended; then `action` runs and all continue."""
        m = self.meetings.setdefault(key, _Meeting(sum(warp_roles.values()), warp_roles=dict(warp_roles)))
        m.warp_roles.pop(warp_role.number)
        m.action = action
        self._settle(key, m)
        self.wait(lambda: m.done, lambda: f"at {why} ({m.need - sum(m.warp_roles.values())} of {m.need} threads are there)",
                  span)

    def _settle(self, key: Any, m: _Meeting) -> None:
        if m.warp_roles.keys() <= self.over:
            del self.meetings[key]
            if m.action is not None:
                m.action()
            m.done = True

    def ended(self, warp_role: WarpRole) -> None:
        """A warp role has ended: no meeting waits for it any more."""
        self.over.add(warp_role.number)
        for key, m in list(self.meetings.items()):
            if m.warp_roles:
                self._settle(key, m)

    def meet(self, key: Any, need: int, n: int, span: Any, why: str, waits: bool = True) -> None:
        """n of `need` threads arrive at a barrier with a thread count; all continue when it is complete."""
        m = self.meetings.setdefault(key, _Meeting(need))
        if m.need != need:
            raise fault("sim-barrier", f"{why} is used with {need} threads and with {m.need} at once",
                        expected="one number of threads", found=f"{need} and {m.need}", span=span)
        m.come += n
        if m.come > m.need:
            raise fault("sim-barrier", f"‹{m.come}› threads arrive at {why}, which is for {need}", expected=f"{need} threads",
                        span=span, hint="give the number of the threads that come, whole warps")
        if m.come == m.need:
            del self.meetings[key]
            m.done = True
        if waits:
            self.wait(lambda: m.done, lambda: f"at {why} ({m.come} of {m.need} threads are there)", span)


def nth(warp_role: WarpRole, key: Any) -> int:
    """How often a warp role has reached `key`, this time included."""
    warp_role.counts[key] = warp_role.counts.get(key, 0) + 1
    return warp_role.counts[key]


class TileScheduler(Scheduler):
    """Runs the warp roles of a block, of the blocks of a cluster, or of all blocks of a grid that meet at its barrier."""

    def __init__(self, blocks: list[TileBlock], frames: list[LaneFrame], body: Action) -> None:
        names = [f"block {f.block.where}" if len(blocks) == len(frames) > 1 else
                 f.warp_role.name + (f" of block {f.block.where}" if len(blocks) > 1 else "") for f in frames]
        super().__init__([Coroutine(f.warp_role.number, name, f, body) for f, name in zip(frames, names)])
        self.block, self.blocks = blocks[0], blocks
        self.come: dict[int, int] = {}  # by id of a coroutine: how often it has arrived at the barrier of the grid
        for b in blocks:
            b.scheduler = self

    def meet(self, span: Any) -> None:
        """The running coroutine waits at the barrier of the grid until all others have arrived as often as it has."""
        me = id(self.now)
        self.come[me] = n = self.come.get(me, 0) + 1
        mates = [p for p in self.coroutines if p.frame.block.device == self.now.frame.block.device]
        self.wait(lambda: all(p.done or self.come.get(id(p), 0) >= n for p in mates),
                  lambda: "at the barrier of the grid", span)
        early = next((p for p in mates if p.done and self.come.get(id(p), 0) < n), None)
        if early is not None:
            raise fault("sim-barrier", f"{early.name} ends without coming to this barrier of the grid",
                        expected="all blocks at the barrier", found=f"{early.name} at its end", span=span,
                        hint="every thread of every block reaches T.sync_grid() equally often")

    def ended(self, coroutine: Coroutine) -> None:
        coroutine.frame.block.ended(coroutine.frame.warp_role)

    def deadlock(self, left: list[Coroutine]) -> Exception:
        states = [b.state() for block in self.blocks for b in block.barriers if b.pending != b.count or b.tx]
        told = [(p.place, f"{p.name} waits {p.why()}") for p in left]
        return fault("sim-barrier", f"all warp roles left wait for ever in block {self.block.where}: "
                     + "; ".join(t for _, t in told) + (f" ({'; '.join(states)})" if states else ""),
                     expected="arrivals that let every warp role go on", found="warp roles that wait for ever",
                     span=told[0][0], notes=tuple(told[1:]), label=told[0][1],
                     hint="check parities and counts of the barriers: each warp role must pass them equally often")
