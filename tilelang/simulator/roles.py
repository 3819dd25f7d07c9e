"""Warps with different roles: each warp of a block runs on its own until a barrier makes it wait.

Needed where a kernel uses named barriers, since then the warps of a block may wait in different places of the program.
Only one warp runs at a time, the lowest that can, so a run is the same every time; races are found by clocks, not by
luck of the order.  Source: PTX ISA, "Parallel synchronization and communication instructions: bar, barrier".
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .faults import fault
from .lane_ops import WARP
from .lanes import LaneFrame

BLOCK_BARRIER = 0


class _Stopped(BaseException):
    """Ends a waiting warp after another has failed."""


@dataclass
class _Barrier:
    """One barrier while threads gather: how many it needs, who has come, what they have seen, who waits."""

    need: int
    come: int = 0
    seen: np.ndarray | None = None
    waiting: list[_Warp] = field(default_factory=list)


class _Warp:
    """One warp: a thread of Python that runs only while it holds the turn."""

    def __init__(self, number: int, frame: LaneFrame, body: Callable[[LaneFrame], None]) -> None:
        self.number, self.frame, self.body = number, frame, body
        self.turn = threading.Semaphore(0)
        self.ready, self.done = True, False
        self.place: Any = None  # where it waits
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None


class Roles:
    """Runs the warps of one block.  Barrier operations of the frames call `wait` and `arrive`."""

    def __init__(self, frames: list[LaneFrame], body: Callable[[LaneFrame], None]) -> None:
        self.warps = [_Warp(i, f, body) for i, f in enumerate(frames)]
        self.block = frames[0].block
        self.block.roles = self
        self.barriers: dict[int, _Barrier] = {}
        self.back = threading.Semaphore(0)
        self.now = self.warps[0]
        self.stopping = False

    def run(self) -> None:
        """Run all warps to the end.  Raises what a warp raises, and sim-barrier when all that are left wait."""
        try:
            while True:
                left = [w for w in self.warps if not w.done]
                if not left:
                    return
                ready = next((w for w in left if w.ready), None)
                if ready is None:
                    raise self._deadlock(left)
                self._resume(ready)
                if ready.failure is not None:
                    raise ready.failure
        finally:
            self.stopping = True
            for w in self.warps:
                if w.thread is not None and w.thread.is_alive():
                    w.turn.release()
                    w.thread.join()

    def _resume(self, w: _Warp) -> None:
        self.now = w
        if w.thread is None:
            w.thread = threading.Thread(target=self._main, args=(w,), daemon=True)
            w.thread.start()
        else:
            w.turn.release()
        self.back.acquire()

    def _main(self, w: _Warp) -> None:
        try:
            with np.errstate(all="ignore"):
                w.body(w.frame)
        except _Stopped:
            return
        except BaseException as e:  # handed to the thread that runs the block
            w.failure = e
        w.done = True
        # Threads that are gone count as arrived at the block barrier.
        b = self.barriers.get(BLOCK_BARRIER)
        if b is not None:
            self._complete(BLOCK_BARRIER, b)
        self.back.release()

    def _threads_left(self) -> int:
        return sum(_threads(w.frame) for w in self.warps if not w.done)

    def arrive(self, f: LaneFrame, number: int, need: int | None, span: Any) -> _Barrier:
        """The active threads of f's warp arrive at a barrier (need: threads, None for the whole block)."""
        threads = int(f.active().sum())
        if threads != _threads(f):
            raise fault("sim-barrier", f"a barrier is reached by {threads} threads of a warp only", span=span)
        b = self.barriers.setdefault(number, _Barrier(need or 0))
        if need is not None and b.need not in (0, need):
            raise fault("sim-barrier", f"barrier {number} is used with {need} threads and with {b.need} at once",
                        span=span, hint="all arrivals at one barrier name the same number of threads")
        seen = self.block.clocks.arrive(f.active())
        b.seen = seen if b.seen is None else np.maximum(b.seen, seen)
        b.come += threads
        return b

    def wait(self, f: LaneFrame, number: int, need: int | None, span: Any) -> None:
        """The active threads of f's warp arrive and go on when the barrier is complete."""
        me = self.now
        b = self.arrive(f, number, need, span)
        b.waiting.append(me)
        me.ready, me.place = False, span
        self._complete(number, b)
        if not me.ready:
            self.back.release()
            me.turn.acquire()
            if self.stopping:
                raise _Stopped
        me.place = None

    def signal(self, f: LaneFrame, number: int, need: int, span: Any) -> None:
        """The active threads of f's warp arrive without waiting."""
        self._complete(number, self.arrive(f, number, need, span))

    def _complete(self, number: int, b: _Barrier) -> None:
        if b.come == 0 or b.come < (b.need or self._threads_left()):
            return
        del self.barriers[number]
        for w in b.waiting:
            self.block.clocks.acquire(w.frame.active(), b.seen)
            w.ready = True

    def _deadlock(self, left: list[_Warp]) -> Exception:
        first = left[0]
        state = "; ".join(f"barrier {n}: {b.come} of {b.need or self._threads_left()} threads"
                          for n, b in sorted(self.barriers.items()))
        notes = tuple((w.place, f"warp {w.number} waits here") for w in left[1:])
        return fault("sim-barrier", f"all warps left wait for ever in block {self.block.where} ({state})",
                     span=first.place, notes=notes, label=f"warp {first.number} waits here",
                     hint="check numbers and counts of the barriers: each role must pass them equally often")


def _threads(f: LaneFrame) -> int:
    """Threads of a warp's frame that have not returned."""
    own = f.active() if f.own is None else f.own
    return int(own.sum()) if f.exited is None else int((own & ~f.exited).sum())


def warp_frames(f: LaneFrame, slots: list[Any], threads: int) -> list[LaneFrame]:
    """One frame for each warp of a block of f.lanes lanes; each sees all lanes and runs its own."""
    out = []
    lane = np.arange(f.lanes)
    for w in range(f.lanes // WARP):
        own = (lane // WARP == w) & (lane < threads)
        g = LaneFrame(list(slots), f.lanes, own, f.block)
        g.own = own
        out.append(g)
    return out


__all__ = ["BLOCK_BARRIER", "Roles", "warp_frames"]
