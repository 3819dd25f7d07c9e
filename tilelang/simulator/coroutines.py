"""Coroutines: the warps, warp groups or warp roles of a block, each of which runs until it must wait.

Each is a Python thread, but only one runs at a time, always the first that can, so that every run is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilelang.errors import brought


class Stopped(BaseException):
    """Unwinds a waiting coroutine after another one has failed."""


class Coroutine:
    """One warp, warp group or warp role; it runs only while the scheduler has resumed it.

    until: the condition it waits for, None while it can run.  place: span of the statement where it waits.  why: description of
    the wait for messages.
    """

    def __init__(self, number: int, name: str, frame: Any, body: Callable[[Any], None]) -> None:
        self.number, self.name, self.frame, self.body = number, name, frame, body
        self.resumed = threading.Semaphore(0)
        self.until: Callable[[], bool] | None = None
        self.done = False
        self.place: Any = None
        self.why: Callable[[], str] = str
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None


class Scheduler:
    """Runs coroutines alternately.  Subclasses define what to do when all wait (`idle`) and how to report a deadlock."""

    def __init__(self, coroutines: list[Coroutine]) -> None:
        self.coroutines = coroutines
        self.back = threading.Semaphore(0)
        self.now = coroutines[0]
        self.stopping = False
        self.random: Any = None  # chooses among the coroutines that can run; None: the first

    def idle(self) -> bool:
        """Called when all coroutines wait: complete some asynchronous work.  Returns whether any was completed."""
        return False

    def ended(self, coroutine: Coroutine) -> None:
        """Called when a coroutine has finished."""

    def deadlock(self, left: list[Coroutine]) -> Exception:
        """The error to raise when all remaining coroutines wait forever."""
        raise NotImplementedError

    def run(self) -> None:
        """Run all coroutines to the end.  Raises what a coroutine raises, and `deadlock` when all remaining ones wait."""
        try:
            while True:
                left = [p for p in self.coroutines if not p.done]
                if not left:
                    return
                able: Iterator[Coroutine] = (p for p in left if p.until is None or p.until())
                if self.random is not None:
                    able = iter(self.random.sample(some := [*able], len(some)))
                ready = next(able, None)
                if ready is not None:
                    self._resume(ready)
                elif not self.idle():
                    raise self.deadlock(left)
        finally:
            self.stopping = True
            for p in self.coroutines:
                if p.thread is not None and p.thread.is_alive():
                    p.resumed.release()
                    p.thread.join()

    def wait(self, until: Callable[[], bool], why: Callable[[], str], place: Any) -> None:
        """The running coroutine waits until `until()` is true."""
        if until():
            return
        me = self.now
        me.until, me.why, me.place = until, why, place
        self.back.release()
        me.resumed.acquire()
        if self.stopping:
            raise Stopped

    def pause(self) -> None:
        """The running coroutine lets others run, where they are chosen at random."""
        if self.random is not None:
            states = iter((False,))
            self.wait(lambda: next(states, True), str, None)

    def _resume(self, p: Coroutine) -> None:
        self.now, p.until = p, None
        if p.thread is None:
            p.thread = threading.Thread(target=self._main, args=(p,), daemon=True)
            p.thread.start()
        else:
            p.resumed.release()
        self.back.acquire()
        if p.failure is not None:
            raise brought(p.failure)

    def _main(self, p: Coroutine) -> None:
        try:
            with np.errstate(all="ignore"):
                p.body(p.frame)
            p.done = True
            self.ended(p)
        except Stopped:
            return
        except BaseException as e:  # re-raised in the Python thread that runs the block
            p.failure = e
        p.done = True
        self.back.release()
