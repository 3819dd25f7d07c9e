"""Data race detection: records who accessed which memory and checks that conflicting accesses are ordered.

Threads of a block carry vector clocks.  `seen[t, u]` is the last clock of thread u whose actions happen before the next
action of thread t.  A block barrier makes the actions of all threads seen by all; a warp or named barrier does so for its
members.  For each granule of a memory, a table keeps the last write (thread, clock) and, for each group of threads, the
last reads since.  An access is a race when a conflicting access by another thread has not been seen.  Blocks of a launch
are ordered only by release and acquire atomics (releases.py).

Agents represent asynchronous work (a TMA load that signals a barrier, the tensor core of a warp group).  They have clocks
too, which threads see when they wait for the work.  Agent numbers follow those of the lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..faults import fault
from ..releases import ordered


_NONE, _MANY = -1, -2
WARP = 32
MOST_REPEATED = 4096  # maximum number of cached read accesses, of some KB each


class Clocks:
    """Happens-before between the threads of one block.  lanes: threads, padded to whole warps.  agents: their number."""

    def __init__(self, lanes: int, agents: int = 0) -> None:
        self.lanes = lanes
        self.now = np.ones(lanes + agents, np.int32)
        self.seen = np.zeros((lanes, lanes + agents), np.int32)
        self.advances = 0  # how often clocks of threads have advanced
        self.partial = False  # whether a barrier of fewer than all threads has happened
        self.foreign: list[tuple[int, int, Any]] = []  # (thread, its clock, what it had then acquired from other blocks)
        self._least: dict[int, np.ndarray] = {}

    def barrier(self, members: np.ndarray | None = None) -> None:
        """A barrier of these threads (a mask), or of the whole block."""
        if members is None:
            # All threads get the greatest clock: the threads of a block may share one table entry.
            self.now[:self.lanes] = self.now[:self.lanes].max()
            self.seen[:] = self.now
            self.now += 1
            self.advances += 1
            self._least.clear()
        else:
            self.acquire(members, self.arrive(members))

    def arrive(self, members: np.ndarray) -> np.ndarray:
        """These threads arrive at a barrier: returns what threads that pass it will have seen, and advances their clocks."""
        who = np.flatnonzero(members)
        know = self.seen[who].max(0)
        know[who] = self.now[who]
        self.advance(who)
        return know

    def advance(self, who: np.ndarray) -> None:
        """Advance the clocks of these threads: their next actions are later than their previous ones.

        Whole warps advance, so that the clocks of a warp stay equal and its threads can share a table entry.  A later clock
        claims nothing about what others have seen.
        """
        self.now[:self.lanes].reshape(-1, min(WARP, self.lanes))[np.unique(who // WARP)] += 1
        self.advances += 1

    def acquire(self, members: np.ndarray, know: np.ndarray) -> None:
        """These threads pass a barrier; `know` is what its arrivals had seen."""
        who = np.flatnonzero(members)
        self.seen[who] = np.maximum(self.seen[who], know)
        self.partial = True
        self._least.clear()

    def learn(self, members: np.ndarray, agent: int, clock: int) -> None:
        """These threads have waited for everything that an agent began up to this clock."""
        column = self.seen[:, agent]
        column[members] = np.maximum(column[members], clock)
        self.partial = True

    def common(self, members: np.ndarray) -> np.ndarray:
        """For each other thread and agent, the clock up to which all of these threads have seen it."""
        who = np.flatnonzero(members)
        rows = self.seen[who]
        rows[np.arange(len(who)), who] = np.iinfo(np.int32).max
        return rows.min(0)

    def least(self, size: int) -> np.ndarray:
        """[thread, group]: the least clock that it has seen of the other threads of the group (`size` consecutive threads)."""
        got = self._least.get(size)
        if got is None:
            s = self.seen[:, :self.lanes].copy()
            np.fill_diagonal(s, np.iinfo(np.int32).max)
            got = self._least[size] = s.reshape(self.lanes, -1, size).min(2)
        return got


class _Peers:
    """Accesses of one kind that do not conflict with each other (reads, or atomics), since the last plain write.

    For each granule and group of threads: the thread (or _MANY), its clock, the site.  Across blocks: the last block, and
    whether there were others.  Threads and clocks refer to the last block, so starting another block needs no reset.
    """

    def __init__(self, granules: int, lanes: int, group: int, many_blocks: bool) -> None:
        shape = (granules, lanes // group)
        self.group, self.many_blocks = group, many_blocks
        self.who = np.full(shape, _NONE, np.int32)
        self.clock = np.zeros(shape, np.int32)
        self.site = np.zeros(shape, np.int32)
        self.block = np.full(granules if many_blocks else 0, _NONE, np.int32)
        self.others = np.zeros(granules if many_blocks else 0, bool)

    def enter(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, block: int) -> None:
        """Record an access of granules g by threads t."""
        if self.many_blocks:
            self._enter_block(clocks, g, t, block)
        k, tt = (t // self.group)[:, None], t[:, None]
        now = clocks.now[t][:, None]
        at = g * self.who.shape[1] + k  # index into the flattened tables, which are faster to read and write
        whos, clock_of = self.who.reshape(-1), self.clock.reshape(-1)
        clock, who = clock_of.take(at), whos.take(at)
        older = clock < now
        if clocks.partial:  # an older access may be dropped only if this thread has seen it
            least = clocks.least(self.group)[tt, k]
            seen = clocks.seen[tt, np.maximum(who, 0)]
            older = older & np.where(who == _MANY, least >= clock, (who < 0) | (seen >= clock))
        mine = np.where(older | (who == tt) | (who == _NONE), tt, _MANY)
        clock_of[at] = np.maximum(clock, now)
        whos[at] = mine
        self.site.reshape(-1)[at] = site
        shared = whos.take(at) != mine  # another lane of this access has the same granule
        if shared.any():
            whos[at[shared]] = _MANY

    def _enter_block(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, block: int) -> None:
        old = self.block[g]
        fresh = old != block
        if fresh.any():
            changed = g[fresh]
            left = old != _NONE
            if clocks.foreign and left.any():  # a thread that sees this access has also seen those before it
                left &= ~self._known(clocks, g, t)
            self.others[changed] |= left[fresh]
            self.block[changed] = block
            self.clock[changed] = 0
            self.who[changed] = _NONE

    def clash(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, block: int) -> tuple[int, int | None, int] | None:
        """An access of another thread that the accesses (g, t) have not seen.

        Returns (row of g, thread or None for another block, site), or None.
        """
        if self.many_blocks:
            there = self.block[g]
            bad = (there != _NONE) & ((there != block) | self.others[g])
            if clocks.foreign and bad.any():
                bad &= self.others[g] | ~self._known(clocks, g, t)
            if bad.any():
                n, k = np.argwhere(bad)[0]
                return int(n), None, int(self.site[g[n, k]].max())
        bad = self.unseen(clocks, g, t, block)
        if bad is None:
            return None
        n, k, group = np.argwhere(bad)[0]
        return int(n), int(self.who[g[n, k], group]), int(self.site[g[n, k], group])

    def unseen(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, block: int) -> np.ndarray | None:
        """[row, column of g, group]: where another thread of this block has made an access that (g, t) have not seen.

        None if there is no such place.
        """
        clock = self.clock[g]  # (n, k, groups)
        if self.many_blocks:
            foreign = (self.block[g] != block)[:, :, None]
            if foreign.any():
                clock = np.where(foreign, 0, clock)
        if not clock.any():
            return None
        who, tt = self.who[g], t[:, None, None]
        late = clocks.seen[tt, np.maximum(who, 0)] < clock
        bad = (clock > 0) & np.where(who == _MANY, clocks.least(self.group)[t][:, None, :] < clock, (who != tt) & late)
        return bad if bad.any() else None

    def _known(self, clocks: Clocks, g: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Whether threads t have acquired all accesses of the last block to granules g."""
        who, clock = self.who[g], self.clock[g]
        there = np.broadcast_to(self.block[g][:, :, None], who.shape)
        return (ordered(clocks, t, there, who, clock) | (who == _NONE)).all(2)

    def forget(self, g: np.ndarray) -> None:
        """A plain write of granules g: later accesses are compared with that write only."""
        self.clock[g] = 0
        self.who[g] = _NONE
        if self.many_blocks:
            self.block[g] = _NONE
            self.others[g] = False


class AccessTable:
    """The last accesses of one memory.

    granules: their number.  group: number of threads that share one table entry (a warp for shared memory, the block for
    global memory); detection is exact when every barrier consists of whole groups.  what: the name in messages ("shared
    memory", "global tensor A").  many_blocks: several blocks of a launch access it (global memory).
    """

    def __init__(self, granules: int, lanes: int, group: int, sites: list[Any], what: str,
                 many_blocks: bool = False) -> None:
        self.sites, self.what, self.many_blocks = sites, what, many_blocks
        self.shape = (granules, lanes, group, many_blocks)
        self.writer = np.full(granules, _NONE, np.int32)
        self.wclock = np.zeros(granules, np.int32)
        self.wsite = np.zeros(granules, np.int32)
        self.wblock = np.full(granules if many_blocks else 0, _NONE, np.int32)
        self.reads = _Peers(*self.shape)
        self.atomics: dict[str, _Peers] = {}  # by family of atomics; "?": atomics that wait
        self.each = lanes  # threads of one of the blocks that run concurrently
        self.agents: dict[int, str] = {}  # names for messages, by agent number
        self.thread: Callable[[int], str] = "thread {}".format  # name of a thread for messages
        self.agent_reads: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # for each agent: clock and site by granule
        self.block = 0  # number of the block being run
        self.released: dict[int, Any] = {}  # records that releases stored at a granule (releases.py)
        self._repeated: dict[Any, Any] = {}
        self._repeated_at: tuple[Any, int, int] = (None, 0, 0)

    def repeated(self, clocks: Clocks) -> dict[Any, Any]:
        """Cache of the read accesses recorded since the last access that was no read: repeating one changes nothing."""
        at = (clocks, clocks.advances, self.block)
        if at != self._repeated_at or len(self._repeated) >= MOST_REPEATED:
            self._repeated, self._repeated_at = {}, at
        return self._repeated

    def changed(self) -> None:
        """An access other than a read has happened to the memory."""
        self._repeated.clear()

    # g: granules (n, k) of n threads t (n,)

    def read(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int) -> None:
        """Threads t read granules g.  Raises sim-race."""
        self._after_write(clocks, g, t, site, "reads")
        self._after_atomics(clocks, g, t, site, "reads")
        self.reads.enter(clocks, g, t, site, self.block)

    def atomic(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int) -> None:
        """Threads t access granules g atomically.  Raises sim-race."""
        self._after_write(clocks, g, t, site, "accesses atomically")
        self._after(self.reads, "read", clocks, g, t, site, "accesses atomically")
        if self.agent_reads:
            self._after_agents(clocks, g, t, site)
        atomic = self.sites[site].atomic
        kind = "?" if atomic is None or atomic.waits else atomic.family
        for other, peers in self.atomics.items():
            if other != kind and "?" not in (other, kind):
                self._after_other_kind(peers, clocks, g, t, site)
        if kind not in self.atomics:
            self.atomics[kind] = _Peers(*self.shape)
        self.changed()
        self.atomics[kind].enter(clocks, g, t, site, self.block)

    def write(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, same: np.ndarray | None = None) -> None:
        """Record that threads t write granules g.  Raises sim-race.

        same: for each thread, whether memory now holds the value it wrote (several threads that store one value in one
        instruction are no race).
        """
        self._after_all(clocks, g, t, site, "writes")
        self.record_write(clocks, g, t, site)
        lost = self.writer[g] != t[:, None]
        if same is not None:
            lost &= ~same[:, None]
        if lost.any():
            n, k = np.argwhere(lost)[0]
            raise self._race(int(t[n]), "writes", site, int(self.writer[g[n, k]]), "writes differently", site)

    def record_write(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int) -> None:
        """Record a write without checks (a copy that has landed)."""
        self.changed()
        self.writer[g] = t[:, None]
        self.wclock[g] = clocks.now[t][:, None]
        self.wsite[g] = site
        self.reads.forget(g)
        for clock, _ in self.agent_reads.values():
            clock[g] = 0
        for peers in self.atomics.values():
            peers.forget(g)
        if self.many_blocks:
            self.wblock[g] = self.block

    # accesses of agents, on behalf of the thread that starts them; g: granules (n,)

    def agent_writes(self, clocks: Clocks, g: np.ndarray, t: int, agent: int, site: int,
                     proxy: Callable[..., None] | None = None) -> None:
        """Thread t starts an agent that writes granules g.  Raises sim-race when an earlier access may still be in progress.

        proxy: called with (clocks, g, t, site) to check the accesses that t has seen, before they are dropped."""
        self._after_all(clocks, g[:, None], np.full(len(g), t), site, "starts a copy over")
        if proxy is not None:
            proxy(clocks, g, t, site)
        self.record_write(clocks, g[None], np.array([agent]), site)

    def agent_reads_of(self, clocks: Clocks, g: np.ndarray, members: np.ndarray, agent: int, site: int) -> None:
        """The threads `members` start an agent that reads granules g.  Raises sim-race if one has not seen a write."""
        common, who = clocks.common(members), self.writer[g]
        late = (who >= 0) & (common[np.maximum(who, 0)] < self.wclock[g])
        if self.many_blocks:
            late |= (self.wblock[g] != _NONE) & (self.wblock[g] != self.block)
        if late.any():
            for t in np.flatnonzero(members):
                self._after_write(clocks, g[late][None], np.array([t]), site, "starts a read of")
        if agent not in self.agent_reads:
            self.agent_reads[agent] = np.zeros(self.shape[0], np.int32), np.zeros(self.shape[0], np.int32)
        clock, sites = self.agent_reads[agent]
        clock[g], sites[g] = clocks.now[agent], site

    def _after_agents(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int) -> None:
        for agent, (clock, sites) in self.agent_reads.items():
            late = clock[g] > clocks.seen[t, agent][:, None]
            if late.any():
                n, k = np.argwhere(late)[0]
                raise self._race(int(t[n]), "writes", site, agent, "may still be reading", int(sites[g[n, k]]))

    def _after_atomics(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, does: str) -> None:
        for peers in self.atomics.values():
            self._after(peers, "accessed atomically", clocks, g, t, site, does)

    def _after_other_kind(self, peers: _Peers, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int) -> None:
        """Check atomic accesses against those of another family by the same block: one statement follows the other."""
        bad = peers.unseen(clocks, g, t, self.block)
        if bad is None:
            return
        own = t // self.each
        bad &= np.arange(bad.shape[2]) * peers.group // self.each == own[:, None, None]
        here = self.sites[site].atomic
        for k in np.unique(peers.site[g][bad]).tolist():
            there = self.sites[k].atomic
            if there is not None and here.misses_order(there):
                n, column, group = np.argwhere(bad & (peers.site[g] == k))[0]
                raise self._race(int(t[n]), f"does an atomic {here.family} to", site, int(peers.who[g[n, column], group]),
                                 f"did an atomic {there.family} to", k)

    def _after(self, peers: _Peers, did: str, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int,
               does: str) -> None:
        clash = peers.clash(clocks, g, t, self.block)
        if clash is not None:
            n, other, other_site = clash
            raise self._race(int(t[n]), does, site, other, did, other_site)

    def _after_all(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, does: str) -> None:
        """Check a write against all earlier accesses."""
        self._after_write(clocks, g, t, site, does)
        self._after(self.reads, "read", clocks, g, t, site, does)
        self._after_atomics(clocks, g, t, site, does)
        if self.agent_reads:
            self._after_agents(clocks, g, t, site)

    def _after_write(self, clocks: Clocks, g: np.ndarray, t: np.ndarray, site: int, does: str) -> None:
        who = self.writer[g]
        bad = (who >= 0) & (who != t[:, None])
        if self.many_blocks:
            there = self.wblock[g]
            other = (there != _NONE) & (there != self.block)
            bad &= ~other
            if clocks.foreign and other.any():
                other &= ~ordered(clocks, t, there, who, self.wclock[g])
            if other.any():
                n, k = np.argwhere(other)[0]
                raise self._race(int(t[n]), does, site, None, "wrote", int(self.wsite[g[n, k]]))
        if bad.any():
            bad &= clocks.seen[t[:, None], np.maximum(who, 0)] < self.wclock[g]
            if bad.any():
                n, k = np.argwhere(bad)[0]
                raise self._race(int(t[n]), does, site, int(who[n, k]), "wrote", int(self.wsite[g[n, k]]))

    def _race(self, t: int, does: str, site: int, other: int | None, did: str, other_site: int) -> Exception:
        here, there = self.sites[site], self.sites[other_site]
        who = {None: "a thread of another block", _MANY: "several threads"}.get(other, "")
        if other is not None and not who:
            who = "a copy" if other in self.agents else self.thread(other)
        hint = ("blocks of one launch are not ordered: use atomics (to hand on what was written, ones that release and "
                "acquire), or give each block its own elements"
                if other is None else "put T.sync_threads() between the two accesses")
        if here.span is not None and here.span == there.span:  # one statement, as in counts[X[i]] += 1
            hint = ("threads that change one element do it with T.atomic_add, T.atomic_max, ...; or give each thread its own "
                    "element, or put T.sync_threads() between the iterations of a loop")
        if other in self.agents:
            who, hint = self.agents[other], "wait for it: on its mbarrier, with wgmma_wait or with bulk_wait"
        text = f"{self.thread(t)} {does} {here.name} ({self.what}), which {who} {did}, with no barrier between"
        return fault("sim-race", text, found=f"none between {self.thread(t)} and {who}", span=here.span,
                     notes=((there.span, f"{who} here: {there.text}"),), hint=hint, label=here.text)
