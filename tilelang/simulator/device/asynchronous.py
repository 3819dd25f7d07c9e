"""Asynchronous work of a block on Hopper: TMA copies, the mbarriers they signal, wgmma, the async proxy.

A load lands as late as possible: when every warp waits.  Asynchronous work is represented by agents, whose accesses are
ordered with those of threads by the clocks of races.py.  The agent of a load is its mbarrier, of a wgmma its warp group, of
a store its issuing thread.
Source: PTX ISA, "Asynchronous operations", "Proxies"; "Parallel synchronization and communication: mbarrier".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang.target.machine import MOST_REGISTERS, REGISTERS_PER_SM

from .mbarrier import MBarrier
from .races import AccessTable, Clocks
from ..faults import fault

GROUP = 128
STORERS = 16  # maximum number of threads of a block that may issue bulk stores; each has two agents


class Proxy:
    """Proxy state of one memory: ordinary stores that no proxy fence has made visible to the async proxy, and the fences.

    dirty: granules written and not fenced by the writer.  stamp: clock of the writer's first fence after the write.
    atomics: (granules, threads, stamps) of atomic updates since the last plain write; stamp < 0: not fenced yet.
    fences: for each warp, (clock, lanes) of its proxy fences in order.  landed: granules that cp.async wrote, which may be
    after any fence of the thread that issued it.  For these a fence of the reader counts too (PTX ISA, "Causality order"), and
    for all granules where other ranks write (of_ranks).
    behind: for each warp, the lanes of its last fence and what all of them had seen of other threads.
    """

    def __init__(self, table: AccessTable, of_ranks: bool = False) -> None:
        self.table, self.of_ranks = table, of_ranks
        self.dirty, self.landed = np.zeros(table.shape[0], bool), np.zeros(table.shape[0], bool)
        self.stamp = np.zeros(table.shape[0], np.int32)
        self.atomics: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.fences: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.behind: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def write(self, g: np.ndarray) -> None:
        """An ordinary store of granules g; it replaces the state of earlier accesses."""
        self.dirty[g] = True
        self.landed[g] = False
        if self.atomics:
            kept = [~np.isin(e[0], g) for e in self.atomics]
            self.atomics = [(a[k], t[k], s[k]) for (a, t, s), k in zip(self.atomics, kept) if k.any()]

    def land(self, g: np.ndarray) -> None:
        """Copies of cp.async to granules g land."""
        self.dirty[g] = self.landed[g] = True

    def update(self, g: np.ndarray, t: np.ndarray) -> None:
        """Atomic updates of granules g[n] by threads t[n]; each thread must execute a fence itself."""
        if len(self.atomics) >= 64:
            whole = [np.concatenate(x) for x in zip(*self.atomics)]
            _, last = np.unique((whole[0].astype(np.int64) * 2**20 + whole[1])[::-1], return_index=True)
            self.atomics = [(a[::-1][last], b[::-1][last], c[::-1][last]) for a, b, c in (whole,)]
        who = np.repeat(t.astype(np.int32), g.shape[1])
        self.atomics.append((g.ravel(), who, np.full(who.shape, -1, np.int32)))

    def fence(self, clocks: Clocks, active: np.ndarray) -> None:
        """These threads execute fence.proxy.async."""
        at = np.flatnonzero(self.dirty)
        if len(at):
            at = at[active[self.table.writer[at]]]
            self.stamp[at] = clocks.now[self.table.writer[at]]
            self.dirty[at] = False
        for _, t, stamps in self.atomics:
            first = (stamps < 0) & active[t]
            stamps[first] = clocks.now[t[first]]
        size = self.table.reads.group
        for w in np.unique(np.flatnonzero(active) // size).tolist():
            lanes = np.flatnonzero(active[w * size:(w + 1) * size]) + w * size
            self.fences.setdefault(w, []).append((int(clocks.now[lanes[0]]), lanes))
            self.behind[w] = lanes, clocks.seen[lanes].min(0)

    def overwrite(self, clocks: Clocks, g: np.ndarray, thread: int, site: int, what: str) -> None:
        """A thread starts an agent that writes granules g, whose earlier accesses the thread has seen.  Raises sim-proxy.

        A barrier does not wait for ordinary loads still in flight; the proxy fence of the loading thread does (observed on
        an H200)."""
        members = np.zeros(clocks.lanes, bool)
        members[thread] = True
        self.require(clocks, g, members, site, what, "overwrites")
        reads, known = self.table.reads, clocks.common(members)
        read_at = reads.clock[g]
        for w in np.flatnonzero(read_at.any(0)).tolist():
            for clock in np.unique(read_at[:, w]).tolist():
                rows = read_at[:, w] == clock
                for reader in np.unique(reads.who[g[rows], w]).tolist() if clock else ():
                    if not self._fenced(w, clock, reader, known):
                        at = g[rows][reads.who[g[rows], w] == reader][0]
                        here, there = self.table.sites[site], self.table.sites[int(reads.site[at, w])]
                        who = f"thread {reader}" if reader >= 0 else "several threads"
                        raise fault("sim-proxy", f"{what} overwrites {here.name}, which {who} read with ordinary loads, with "
                                    "no fence_proxy_async between the load and the barrier: it may still be under way",
                                    found=f"no fence between the load of {here.name} and the barrier",
                                    span=here.span, notes=((there.span, "read here"),), hint="each thread that read "
                                    "executes fence_proxy_async(), then a barrier, then the copy is issued")

    def _fenced(self, warp: int, clock: int, reader: int, known: np.ndarray) -> bool:
        """Whether `known` covers the reader's first fence after this clock.  reader < 0: several lanes of the warp
        read, and any of them may have executed the fence."""
        fences = self.fences.get(warp, [])
        for at, lanes in fences[bisect_left(fences, clock, key=lambda x: x[0]):]:
            if reader < 0 or reader in lanes:
                return bool((known[lanes] >= at).any() if reader < 0 else known[reader] >= at)
        return False

    def _fenced_by_readers(self, members: np.ndarray, writer: np.ndarray, clock: np.ndarray) -> np.ndarray:
        """Which writes (writer, clock) these threads had all seen when they executed their last fence."""
        size, good = self.table.reads.group, np.ones(writer.shape, bool)
        for w in np.unique(members // size).tolist():
            lanes, seen = self.behind.get(w, (members[:0], np.zeros(0, np.int32)))
            if not np.isin(members[members // size == w], lanes).all():
                return np.zeros_like(good)
            good &= seen[writer] >= clock
        return good

    def require(self, clocks: Clocks, g: np.ndarray, members: np.ndarray, site: int, what: str,
                does: str = "reads") -> None:
        """The threads `members` start an agent that reads (or overwrites) granules g.  Raises sim-proxy."""
        writer = self.table.writer[g]
        ordinary = (writer >= 0) & (writer < clocks.lanes)
        late = ordinary & (self.dirty[g] | (self.stamp[g] > clocks.common(members)[np.maximum(writer, 0)]))
        if late.any():
            known = self._fenced_by_readers(np.flatnonzero(members), np.maximum(writer, 0), self.table.wclock[g])
            late &= ~((self.landed[g] | self.of_ranks) & known)
        if late.any():
            at = g[late][0]
            here, there = self.table.sites[site], self.table.sites[int(self.table.wsite[at])]
            raise fault("sim-proxy", f"{what} {does} {here.name}, which thread {int(self.table.writer[at])} wrote with "
                        "ordinary stores, and that thread executed no fence_proxy_async between its store and the barrier",
                        found=f"no fence by thread {int(self.table.writer[at])} after its store", span=here.span,
                        notes=((there.span, "written here"),))
        for a, t, stamps in self.atomics:
            found = np.isin(a, g) & ((stamps < 0) | (stamps > clocks.common(members)[t]))
            if found.any():
                here = self.table.sites[site]
                raise fault("sim-proxy", f"{what} {does} {here.name}, which thread {int(t[found][0])} updated atomically, "
                            "and that thread executed no fence_proxy_async between its update and the barrier",
                            found=f"no fence by thread {int(t[found][0])} after its update", span=here.span)


@dataclass
class _Load:
    """A load in flight: `land()` writes its bytes to shared memory, then its mbarrier counts them."""

    bar: MBarrier
    nbytes: int
    clock: int
    land: Callable[[], None]
    span: Any
    name: str


class _Storer:
    """Bulk groups of one thread.  The clock of its two agents (reads, writes) is the number of the open group."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes
        self.last = 0  # newest group that contains a store
        self.span: Any = None


class Asynchronous:
    """Asynchronous work of one block, or of the blocks of a cluster.

    threads: of a block.  first: number of the first agent; lower numbers are lanes.  barriers: number of mbarriers.
    raised: the greatest register count that the program's set_max_nreg raises to, None without one.
    """

    def __init__(self, block: Any, threads: int, first: int, barriers: int, tables: list[AccessTable],
                 raised: int | None = None) -> None:
        self.block, self.tables = block, tables
        self.barriers: dict[int, MBarrier] = {}
        self.loads: list[_Load] = []
        self.storers: dict[int, _Storer] = {}
        self.next_barrier, self.first_group = first, first + barriers
        self.groups = -(-first // GROUP)
        self.first_storer = self.first_group + self.groups
        for g in range(self.groups):
            self._name(self.first_group + g, f"a wgmma of warp group {g}")
        # Like ptxas: as many registers as the launch has room for in whole warp groups, but no more than requested.
        room = REGISTERS_PER_SM // (-(-threads // GROUP) * GROUP) // 8 * 8
        per_thread = min(room, MOST_REGISTERS if raised is None else raised)
        self.warps = -(-threads // 32)
        self.registers = {w: per_thread for w in range(-(-first // 32))}
        self.allocated = per_thread * self.warps

    @staticmethod
    def agents(lanes: int, barriers: int) -> int:
        """Number of agents that a block (or cluster) with this many lanes needs."""
        return barriers + -(-lanes // GROUP) + 2 * STORERS

    def mates(self, warp: int) -> range:
        """The warps of the block that contains `warp`."""
        cluster = self.block.cluster
        first = 0 if cluster is None else warp // (cluster.lanes // 32) * (cluster.lanes // 32)
        return range(first, first + self.warps)

    def _name(self, agent: int, text: str) -> None:
        for t in self.tables:
            t.agents[agent] = text

    def add_barrier(self, address: int, name: str, count: int, thread: int) -> None:
        """A thread executes mbarrier_init."""
        self._name(self.next_barrier, f"a copy that signals {name}")
        self.barriers[address] = MBarrier(name, count, self.next_barrier, thread, int(self.block.clocks.now[thread]))
        self.next_barrier += 1

    # -- loads

    def begin(self, bar: MBarrier, nbytes: int, land: Callable[[], None], span: Any, name: str) -> int:
        """Start a load; returns the clock of its writes."""
        now = self.block.clocks.now
        clock = int(now[bar.agent])
        now[bar.agent] += 1
        bar.span = span
        self.loads.append(_Load(bar, nbytes, clock, land, span, name))
        return clock

    def signal(self, bar: MBarrier, land: Callable[[], None], span: Any) -> None:
        """Copies by threads that signal an mbarrier: `land()` completes them and arrives."""
        self.loads.append(_Load(bar, 0, 0, land, span, "shared memory"))

    def land(self) -> bool:
        """Called when all parts wait: the oldest load lands."""
        if not self.loads:
            return False
        load = self.loads.pop(0)
        load.land()
        bar = load.bar
        seen = np.zeros(len(self.block.clocks.now), np.int32)
        seen[bar.agent] = load.clock
        bar.know(seen)
        bar.receive(load.nbytes)
        return True

    # -- bulk stores

    def storer(self, thread: int) -> _Storer:
        """The bulk groups of a thread."""
        got = self.storers.get(thread)
        if got is None:
            k = self.first_storer + 2 * (len(self.storers) % STORERS)
            got = self.storers[thread] = _Storer(k, k + 1)
            self._name(k, f"a bulk store of thread {thread}")
            self._name(k + 1, f"a bulk store of thread {thread}")
        return got

    # -- messages and the end

    def states(self) -> list[str]:
        """State of every mbarrier in use, for the message of a deadlock."""
        return [b.state() for b in self.barriers.values() if b.pending != b.count or b.tx]

    def finish(self) -> None:
        """Called when the block ends.  Raises sim-async when copies of its shared memory are in flight."""
        if self.loads:
            load = self.loads[0]
            raise fault("sim-async", f"the block ends while a copy into {load.name} is under way ({load.bar.state()})",
                        found=f"a copy into {load.name} under way at the end of the block",
                        span=load.span, hint="wait on the mbarrier of every load before the kernel ends")
        seen = self.block.clocks.seen
        for t, s in self.storers.items():
            if s.last > seen[t, s.reads]:
                raise fault("sim-async", f"the block ends while a bulk store of thread {t} reads its shared memory",
                            found=f"a bulk store of thread {t} under way at the end of the block",
                            span=s.span, hint="bulk_commit and bulk_wait by the thread that issued the store")
