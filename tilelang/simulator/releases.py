"""Release and acquire atomics: order the accesses of a block that sets a flag before those of a block that reads it.

A release stores at the flag what its thread has seen: the clocks of races.py, for each block.  Atomic updates of the flag
by other threads keep this record, a plain store replaces it (PTX ISA, "Release and Acquire Patterns": a chain of updates
belongs to its release).  A later acquire takes the record over, and the accesses of other blocks that it covers are
ordered, hence no races.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir.expr import Call

RELEASES = frozenset(("release", "acq_rel", "seq_cst"))
ACQUIRES = frozenset(("consume", "acquire", "acq_rel", "seq_cst"))

Knowledge = dict[int, np.ndarray]  # by block number: the clock of each of its threads


class Releases:
    """Release and acquire behaviour of one atomic operation.  Flags are in global memory that the launch writes."""

    def __init__(self, e: Call) -> None:
        kind, order = e.op.removeprefix("atomic_"), e.options.order
        self.kind, self.order, self.system = kind, order, e.options.scope == "sys"
        self.releases = kind != "load" and order in RELEASES
        self.acquires = kind != "store" and order in ACQUIRES
        self.replaces = kind == "store"
        self.concerns = self.releases or self.acquires or self.replaces

    def before(self, f: Any, table: Any, flags: np.ndarray) -> None:
        """Called before the active lanes read their flags.  flags: first granule of each lane's flag."""
        if self.acquires and table.released:
            for t in np.flatnonzero(f.active()):
                left = table.released.get(int(flags[t]))
                if left is not None:
                    learn(f.block.clocks, int(t), left, table.block)

    def after(self, f: Any, table: Any, flags: np.ndarray) -> None:
        """Called after the active lanes have changed their flags."""
        if not (self.releases or self.replaces and table.released):
            return
        for t in np.flatnonzero(f.active()):
            flag = int(flags[t])
            left = {} if self.replaces else table.released.get(flag, {})
            if self.releases:
                left = merged(left, known_by(f.block.clocks, int(t), table.block))
            table.released[flag] = left


def known_by(clocks: Any, thread: int, block: int) -> Knowledge:
    """The accesses that a release by this thread makes visible; the thread's next actions are later than it."""
    out: Knowledge = {}
    for who, clock, left in clocks.foreign:
        if who == thread or clocks.seen[thread, who] >= clock:
            out = merged(out, left)
    member = np.zeros(clocks.lanes, bool)
    member[thread] = True
    return merged(out, {block: clocks.arrive(member)})


def learn(clocks: Any, thread: int, left: Knowledge, block: int) -> None:
    """A thread acquires the record of a flag; so do threads that synchronise with it from now on."""
    member = np.zeros(clocks.lanes, bool)
    member[thread] = True
    if block in left:  # blocks that run concurrently have common clocks
        clocks.acquire(member, left[block])
    others = {b: know for b, know in left.items() if b != block}
    if others:
        clocks.foreign.append((thread, int(clocks.now[thread]), others))


def merged(a: Knowledge, b: Knowledge) -> Knowledge:
    """The union of two records: for each thread the later clock."""
    return {k: np.maximum(a[k], b[k]) if k in a and k in b else (a[k] if k in a else b[k]) for k in (*a, *b)}


def ordered(clocks: Any, t: np.ndarray, block: np.ndarray, who: np.ndarray, clock: np.ndarray) -> np.ndarray:
    """Which accesses by other blocks the threads t have acquired.

    block, who, clock: arrays of one shape, with a row for each thread of t.  who < 0 means no single thread and is not ordered.
    """
    out = np.zeros(block.shape, bool)
    rows: Callable[[np.ndarray], np.ndarray] = lambda x: x.reshape(-1, *(1,) * (block.ndim - 1))  # noqa: E731
    for thread, at, left in clocks.foreign:
        sees = rows((t == thread) | (clocks.seen[t, thread] >= at))
        for number, know in left.items():
            out |= sees & (block == number) & (who >= 0) & (know[np.maximum(who, 0)] >= clock)
    return out
