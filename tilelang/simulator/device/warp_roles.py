"""Runs the warps, or warp groups, of a block independently, each until a barrier makes it wait.

This is needed where a kernel uses named barriers or mbarriers, since the warps of a block may then wait in different places
of the program.  Races are found by clocks, so the order in which warps run does not matter.  Source: PTX ISA, "Parallel
synchronization and communication instructions: bar, barrier".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.target.thread_calls import WARP

from ..coroutines import Coroutine, Scheduler
from ..faults import fault
from ..lanes import LaneFrame

BLOCK_BARRIER = 0


class SplitGroups(Exception):
    """Warps of one warp group wait in different places: the block must be run again with each warp independent."""


@dataclass
class _Barrier:
    """State of one barrier phase: the threads needed, those that have arrived, what they have seen, and who waits."""

    need: int
    come: int = 0
    seen: np.ndarray | None = None
    waiting: list[LaneFrame] = field(default_factory=list)
    done: bool = False


class WarpRoles(Scheduler):
    """Runs the warps or warp groups of a block, each as a coroutine.

    Barrier operations of the frames call `wait_named` and `signal`.

    frames: one for each coroutine.  unit: threads of a coroutine.  asynchronous: the copies and instructions in flight in the
    block (asynchronous.Asynchronous), None where there are none.
    """

    def __init__(self, frames: list[LaneFrame], body: Callable[[LaneFrame], None], unit: int = WARP,
                 asynchronous: Any = None, random: Any = None) -> None:
        self.kind = "warp" if unit == WARP else "warp group"
        number: dict[int, int] = {}  # by block
        coroutines = []
        for f in frames:
            i = number[id(f.block)] = number.get(id(f.block), -1) + 1
            coroutines.append(Coroutine(i, f"{self.kind} {i}", f, body))
        super().__init__(coroutines)
        self.unit, self.asynchronous, self.random = unit, asynchronous, random
        self.block = frames[0].block
        for f in frames:
            f.block.warp_roles = self
        self.barriers: dict[tuple[int, int], _Barrier] = {}  # by rank of the block in its cluster, and barrier number
        self.voted: dict[tuple[int, int], int] = {}  # how many votes of its block a coroutine has joined
        self.ballots: dict[tuple[int, int], list[np.ndarray]] = {}  # by rank, and number of the vote

    def votes(self, f: LaneFrame) -> list[np.ndarray]:
        """The list to which a coroutine appends its threads' values in the next vote of its block."""
        me = f.block.rank, int(np.flatnonzero(f.active())[0]) // self.unit
        number = self.voted[me] = self.voted.get(me, -1) + 1
        return self.ballots.setdefault((f.block.rank, number), [])

    def idle(self) -> bool:
        return self.asynchronous is not None and self.asynchronous.land()

    def ended(self, coroutine: Coroutine) -> None:
        # Threads that have ended count as arrived at the block barrier and at the cluster barrier.
        block = coroutine.frame.block
        b = self.barriers.get((block.rank, BLOCK_BARRIER))
        if b is not None:
            self._complete(block, BLOCK_BARRIER, b)
        if block.cluster is not None:
            block.cluster.ended(coroutine, self.coroutines)

    def _threads_left(self, rank: int) -> int:
        return sum(int(p.frame.running().sum()) for p in self.coroutines if not p.done and p.frame.block.rank == rank)

    def arrive(self, f: LaneFrame, number: int, need: int | None, span: Any) -> _Barrier:
        """The active threads of f arrive at a barrier (need: threads, None for the whole block)."""
        active = f.active()
        if not in_whole_warps(f):
            raise fault("sim-barrier", f"a barrier is reached by ‹{int(active.sum())} threads of a warp› only", span=span)
        b = self.barriers.setdefault((f.block.rank, number), _Barrier(need or 0))
        if need is not None and b.need not in (0, need):
            raise fault("sim-barrier", f"barrier {number} is used with {need} threads and with {b.need} at once",
                        expected="one number of threads", found=f"{need} and {b.need}",
                        span=span, hint="all arrivals at one barrier name the same number of threads")
        seen = self.block.clocks.arrive(active)
        b.seen = seen if b.seen is None else np.maximum(b.seen, seen)
        # A barrier with a thread count counts a warp as 32 threads, however many it has: PTX ISA, "bar".
        b.come += int(active.sum()) if need is None else WARP * int(active.reshape(-1, WARP).any(1).sum())
        return b

    def wait_named(self, f: LaneFrame, number: int, need: int | None, span: Any) -> None:
        """The active threads of f arrive, and continue when the barrier is complete."""
        b = self.arrive(f, number, need, span)
        b.waiting.append(f)
        self._complete(f.block, number, b)
        self.wait(lambda: b.done, lambda: f"at barrier {number}", span)

    def signal(self, f: LaneFrame, number: int, need: int, span: Any) -> None:
        """The active threads of f arrive without waiting."""
        self._complete(f.block, number, self.arrive(f, number, need, span))

    def _complete(self, block: Any, number: int, b: _Barrier) -> None:
        if b.come == 0 or b.come < (b.need or self._threads_left(block.rank)):
            return
        del self.barriers[block.rank, number]
        for f in b.waiting:
            self.block.clocks.acquire(f.active(), b.seen)
        b.done = True

    def deadlock(self, left: list[Coroutine]) -> Exception:
        """The error for a deadlock; SplitGroups when its cause may be that warps of one warp group diverge."""
        if self.unit > WARP and any((p.frame.active() != p.frame.running()).any() for p in left):
            return SplitGroups()
        cluster = self.block.cluster
        states = [f"barrier {n}{f' of block {cluster.names[r]}' if cluster else ''}: {b.come} of "
                  f"{b.need or self._threads_left(r)} threads" for (r, n), b in sorted(self.barriers.items())]
        if cluster is not None:
            states += cluster.state()
        if self.asynchronous is not None:
            states += self.asynchronous.states()
        waits: dict[tuple[Any, str, int], list[Coroutine]] = {}
        for p in left:
            waits.setdefault((p.place, p.why(), p.frame.block.rank), []).append(p)
        told = [(place, f"{self._names(coroutines)} {'wait' if len(coroutines) > 1 else 'waits'} {why}")
                for (place, why, _), coroutines in waits.items()]
        return fault("sim-barrier", f"all {self.kind}s left wait for ever in block {left[0].frame.block.where}: "
                     + "; ".join(t for _, t in told) + (f" ({'; '.join(states)})" if states else ""),
                     expected=f"arrivals that let every {self.kind} go on", found=f"{self.kind}s that wait for ever",
                     span=told[0][0], notes=tuple(told[1:]), label=told[0][1],
                     hint="check numbers and counts of the barriers: each warp role must pass them equally often")

    def _names(self, coroutines: list[Coroutine]) -> str:
        block = coroutines[0].frame.block
        numbers = [p.number for p in coroutines]
        of = f" of block {block.where}" if block.cluster is not None else ""
        if len(coroutines) == 1:
            return f"{self.kind} {numbers[0]}{of}"
        dense = numbers == list(range(numbers[0], numbers[-1] + 1))
        return f"{self.kind}s " + (f"{numbers[0]} to {numbers[-1]}" if dense else ", ".join(map(str, numbers))) + of


def in_whole_warps(f: LaneFrame) -> bool:
    """Whether all threads of the active warps that have not returned are active."""
    active = f.active()
    return bool((active == (f.running() & np.repeat(active.reshape(-1, WARP).any(1), WARP))).all())


def unit_frames(f: LaneFrame, slots: list[Any], threads: int, unit: int) -> list[LaneFrame]:
    """One frame for each warp (or warp group) of `unit` threads of a block.  Each has all lanes and executes its own."""
    out = []
    lane = np.arange(f.lanes) - f.block.first
    for w in range(-(-threads // unit)):
        own = (lane // unit == w) & (lane < threads)
        g = LaneFrame(list(slots), f.lanes, own, f.block)
        g.own = own
        out.append(g)
    return out
