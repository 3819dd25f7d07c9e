"""Who touched which memory, and was it ordered?

Threads of a block carry clocks.  `seen[t, u]` is the last clock of thread u whose actions happen before what thread t
does now; a block barrier makes everything seen by everybody, a warp or named barrier by its members.  For each granule
of a memory a table keeps the last write (thread, clock) and, per group of threads, the last reads since; an access is a
race when a conflicting one by another thread is not seen.  Blocks of a launch are never ordered with each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import fault


_NONE, _MANY = -1, -2


class Clocks:
    """Happens-before between the threads of one block.  lanes: threads, padded to whole warps."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.now = np.ones(lanes, np.int32)
        self.seen = np.zeros((lanes, lanes), np.int32)
        self.partial = False  # a barrier of fewer than all threads has happened
        self._least: dict[int, np.ndarray] = {}

    def barrier(self, members: np.ndarray | None = None) -> None:
        """A barrier of these threads (a mask), or of the whole block."""
        if members is None:
            self.seen[:] = self.now
            self.now += 1
            self._least.clear()
        else:
            self.acquire(members, self.arrive(members))

    def arrive(self, members: np.ndarray) -> np.ndarray:
        """These threads arrive at a barrier: what whoever passes it will have seen.  Their next actions come later."""
        who = np.flatnonzero(members)
        know = self.seen[who].max(0)
        know[who] = self.now[who]
        self.now[who] += 1
        return know

    def acquire(self, members: np.ndarray, know: np.ndarray) -> None:
        """These threads pass a barrier whose arrivals had seen this."""
        who = np.flatnonzero(members)
        self.seen[who] = np.maximum(self.seen[who], know)
        self.partial = True
        self._least.clear()

    def least(self, size: int) -> np.ndarray:
        """[thread, group]: the least clock of the other threads of a group (size consecutive threads) that thread has
        seen."""
        got = self._least.get(size)
        if got is None:
            s = self.seen.copy()
            np.fill_diagonal(s, np.iinfo(np.int32).max)
            got = self._least[size] = s.reshape(self.lanes, -1, size).min(2)
        return got


class AccessTable:
    """Last accesses of one memory.

    granules: how many units.  group: threads that share one slot of read bookkeeping (a warp for shared memory, the
    block for global); exact when every barrier is one of whole groups.  what: words for messages ("shared memory",
    "global tensor A").
    """

    def __init__(self, granules: int, lanes: int, group: int, sites: list[Any], what: str) -> None:
        self.group, self.sites, self.what = group, sites, what
        groups = lanes // group
        self.writer = np.full(granules, _NONE, np.int32)
        self.wclock = np.zeros(granules, np.int32)
        self.wsite = np.zeros(granules, np.int32)
        self.watomic = np.zeros(granules, bool)
        self.reader = np.full((granules, groups), _NONE, np.int32)
        self.rclock = np.zeros((granules, groups), np.int32)
        self.rsite = np.zeros((granules, groups), np.int32)
        # Global memory: the last block that wrote, the last that read, whether others read too.  Threads and clocks
        # above belong to that block, so that entering the next block costs nothing.
        self.many_blocks = False
        self.wblock = self.rblock = np.zeros(0, np.int32)
        self.rmany = np.zeros(0, bool)
        self.block = 0

    def across_blocks(self) -> None:
        """Also compare with the other blocks of the launch (global memory)."""
        self.many_blocks = True
        self.wblock = np.full(len(self.writer), _NONE, np.int32)
        self.rblock = np.full(len(self.writer), _NONE, np.int32)
        self.rmany = np.zeros(len(self.writer), bool)

    # g: granules (n, k) of n threads t (n,)

    def read(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int) -> None:
        """Threads t read granules g.  Raises sim-race."""
        self._after_write(clocks, g, t, site, "reads", atomic=False)
        k = (t // self.group)[:, None]
        now = clocks.now[t][:, None]
        if self.many_blocks:
            self._read_by_block(g)
        clock, who = self.rclock[g, k], self.reader[g, k]
        older = clock < now
        if clocks.partial:  # an older reader may be forgotten only if this thread has seen it
            tt = np.broadcast_to(t[:, None], g.shape)
            known = np.where(who == _MANY, clocks.least(self.group)[tt, np.broadcast_to(k, g.shape)] >= clock,
                             (who < 0) | (clocks.seen[tt, np.maximum(who, 0)] >= clock))
            older = older & known
        mine = np.where(older | (who == t[:, None]) | (who == _NONE), t[:, None], _MANY)
        self.rclock[g, k] = np.maximum(clock, now)
        self.reader[g, k] = mine
        self.rsite[g, k] = site
        shared = self.reader[g, k] != mine
        if shared.any():
            self.reader[g[shared], np.broadcast_to(k, g.shape)[shared]] = _MANY

    def _read_by_block(self, g: np.ndarray) -> None:
        """This block reads granules g: forget what other blocks' threads read, remember that they did."""
        old = self.rblock[g]
        fresh = old != self.block
        if fresh.any():
            changed = g[fresh]
            self.rmany[changed] |= old[fresh] != _NONE
            self.rblock[changed] = self.block
            self.rclock[changed] = 0
            self.reader[changed] = _NONE

    def write(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, atomic: bool = False,
              same: np.ndarray | None = None) -> None:
        """Threads t write granules g.  same: per thread, whether memory now holds the value it wrote (several threads
        storing one value in one instruction is no race).  Raises sim-race."""
        self._after_write(clocks, g, t, site, "writes", atomic)
        if self.many_blocks:
            seen = self.rblock[g]
            bad = (seen != _NONE) & ((seen != self.block) | self.rmany[g])
            if bad.any():
                n, k = np.argwhere(bad)[0]
                raise self._race(int(t[n]), "writes", site, None, "read", int(self.rsite[g[n, k]].max()))
        clock, who = self.rclock[g], self.reader[g]  # (n, k, groups)
        if clock.any():
            tt = t[:, None, None]
            late = clocks.seen[np.broadcast_to(tt, who.shape), np.maximum(who, 0)] < clock
            many = clocks.least(self.group)[t][:, None, :] < clock
            bad = (clock > 0) & np.where(who == _MANY, many, (who != tt) & late)
            if bad.any():
                n, k, group = np.argwhere(bad)[0]
                other = int(who[n, k, group])
                raise self._race(int(t[n]), "writes", site, other, "read", int(self.rsite[g[n, k], group]))
        self.record_write(clocks, g, t, site, atomic)
        if not atomic:
            lost = self.writer[g] != t[:, None]
            if same is not None:
                lost &= ~same[:, None]
            if lost.any():
                n, k = np.argwhere(lost)[0]
                raise self._race(int(t[n]), "writes", site, int(self.writer[g[n, k]]), "writes differently", site)

    def record_write(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, atomic: bool = False) -> None:
        """Enter a write without comparing (a copy that has landed)."""
        self.writer[g] = t[:, None]
        self.wclock[g] = clocks.now[t][:, None]
        self.wsite[g] = site
        self.watomic[g] = atomic
        self.rclock[g] = 0
        self.reader[g] = _NONE
        if self.many_blocks:
            self.wblock[g] = self.block
            self.rblock[g] = _NONE
            self.rmany[g] = False

    def _after_write(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, does: str, atomic: bool) -> None:
        who, clock = self.writer[g], self.wclock[g]
        bad = (who >= 0) & (who != t[:, None])
        if self.many_blocks:
            bad &= self.wblock[g] == self.block
        if bad.any():
            bad &= clocks.seen[np.broadcast_to(t[:, None], who.shape), np.maximum(who, 0)] < clock
            if atomic:
                bad &= ~self.watomic[g]
            if bad.any():
                n, k = np.argwhere(bad)[0]
                raise self._race(int(t[n]), does, site, int(who[n, k]), "wrote", int(self.wsite[g[n, k]]))
        if self.many_blocks:
            other = self.wblock[g]
            bad = (other != _NONE) & (other != self.block)
            if atomic:
                bad &= ~self.watomic[g]
            if bad.any():
                n, k = np.argwhere(bad)[0]
                raise self._race(int(t[n]), does, site, None, "wrote", int(self.wsite[g[n, k]]))

    def _race(self, t: int, does: str, site: int, other: int | None, did: str, other_site: int) -> Exception:
        here, there = self.sites[site], self.sites[other_site]
        who = {None: "a thread of another block", _MANY: "several threads"}.get(other, f"thread {other}")
        hint = ("blocks of one launch are not ordered: use atomics, or give each block its own elements"
                if other is None else "put T.sync_threads() between the two accesses")
        text = f"thread {t} {does} {here.name} ({self.what}), which {who} {did}, with no barrier between"
        return fault("sim-race", text, span=here.span, notes=((there.span, f"{who} here: {there.text}"),), hint=hint,
                     label=here.text)


__all__ = ["AccessTable", "Clocks"]
