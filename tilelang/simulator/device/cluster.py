"""Clusters on the device simulator: CTAs run concurrently, access each other's shared memory, share a cluster barrier.

The simulator runs a cluster as one block of all its lanes: CTA r has the lanes from r * lanes on and its own section of one
arena of shared memory, so the clocks of races.py cover accesses across CTAs.  Besides races it finds accesses to the memory
of a CTA that may not have started or may have ended, and copies that a CTA does not wait for before it ends.
Source: PTX ISA, "Cluster of Cooperative Thread Arrays", "barrier.cluster", "mapa"; CUDA C++ Programming Guide,
"Distributed Shared Memory".
"""

# mypy: disable-error-code="attr-defined"
# The verifier ensures that memory operands of these calls are AddressOf; Call.args is typed as Expr.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilelang.ir import Call, numpy_dtype
from tilelang.ir.evaluate import Closure, Value

from .context import DeviceContext
from .counters import count_warps
from .mbarrier import Barrier
from .warp_roles import in_whole_warps
from ..faults import fault
from ..lane_ops import effects, spread
from ..lanes import Action, LaneFrame
from ..memory import shared_operand


class Meetings:
    """The cluster barriers of a Cluster that contains several clusters of `blocks` CTAs each."""

    def __init__(self, size: int, lanes: int, blocks: int, what: str) -> None:
        self.each, self.what = blocks * lanes, what
        clusters = size // blocks
        self.phase = [0] * clusters  # number of completed phases
        self.come = np.zeros(size * lanes, bool)
        self.arrivals = np.zeros(size * lanes, np.int32)
        self.waits = np.zeros(size * lanes, np.int32)
        self.seen: list[np.ndarray | None] = [None] * clusters
        self.before: list[dict[int, np.ndarray | None]] = [{} for _ in range(clusters)]

    def cluster_index(self, active: np.ndarray) -> int:
        """Number of the cluster that contains the active threads, which belong to one block."""
        return int(active.argmax()) // self.each

    def arrive(self, f: LaneFrame, relaxed: bool, span: Any) -> None:
        """The active threads arrive; relaxed: their earlier accesses are not made visible."""
        active = f.active()
        _whole_warps(f, "cluster_arrive", span)
        if (self.arrivals[active] > self.waits[active]).any():
            raise fault("sim-cluster", f"threads arrive again at the {self.what} before they wait for it",
                        expected="a wait between two arrivals", found="two arrivals", span=span,
                        hint="each cluster_arrive is followed by one cluster_wait")
        cluster_index = self.cluster_index(active)
        for bar in f.block.asynchronous.barriers.values() if relaxed else ():
            if bar.released and active[bar.maker] and not bar.opened:
                bar.opened = self.phase[cluster_index] + 1  # fence.mbarrier_init released it to the cluster
        if not relaxed:
            seen, known = f.block.clocks.arrive(active), self.seen[cluster_index]
            self.seen[cluster_index] = seen if known is None else np.maximum(known, seen)
        self.arrivals[active] += 1
        self.come |= active
        self.settle(f.block.warp_roles.coroutines)

    def settle(self, coroutines: list[Any]) -> None:
        """Complete the phases at which all threads that have not ended have arrived."""
        left = np.zeros(len(self.come), bool)
        for p in coroutines:
            if not p.done:
                left |= p.frame.running()
        for cluster_index in range(len(self.phase)):
            here = slice(cluster_index * self.each, (cluster_index + 1) * self.each)
            if self.come[here].any() and not (left[here] & ~self.come[here]).any():
                self.phase[cluster_index] += 1
                self.before[cluster_index] = {self.phase[cluster_index]: self.seen[cluster_index]}
                self.come[here], self.seen[cluster_index] = False, None

    def wait(self, f: LaneFrame, span: Any) -> None:
        """The active threads wait until the phase at which they arrived is complete."""
        active = f.active()
        _whole_warps(f, "cluster_wait", span)
        if (self.arrivals[active] != self.waits[active] + 1).any():
            raise fault("sim-cluster", f"threads wait for the {self.what} without having arrived at it",
                        expected="an arrival before the wait", found="none", span=span,
                        hint="cluster_arrive first, or cluster_sync for both")
        number, cluster_index = int(self.arrivals[active][0]), self.cluster_index(active)
        f.block.warp_roles.wait(lambda: self.phase[cluster_index] >= number, lambda: f"at the {self.what}", span)
        self.waits[active] += 1
        seen = self.before[cluster_index].get(number)
        if seen is not None:
            f.block.clocks.acquire(active, seen)

    def state(self) -> list[str]:
        """State of the barriers, for the message of a deadlock."""
        return [f"{self.what}: {int(self.come.sum())} threads have come"] if self.come.any() else []


class Cluster:
    """State of one cluster, or of all clusters of a grid with a grid barrier.

    size: number of CTAs.  lanes: of one CTA, whole warp groups.  arena: bytes of shared memory of one CTA.  mates: CTAs of a
    cluster.  grid: CTAs that meet at the barrier of the grid, those of one rank.
    """

    def __init__(self, size: int, lanes: int, arena: int, names: list[str], mates: int, grid: int) -> None:
        self.size, self.lanes, self.arena, self.names, self.mates = size, lanes, arena, names, mates
        self.own = Meetings(size, lanes, mates, "cluster barrier")
        self.grid = Meetings(size, lanes, grid, "barrier of the grid")
        self.over: set[int] = set()
        self.touched: dict[int, dict[int, tuple[int, Any]]] = {r: {} for r in range(size)}  # by CTA, thread: clock, span
        self.sources: dict[int, list[tuple[int, int, Any]]] = {r: [] for r in range(size)}  # agent, clock, span

    def thread(self, lane: int) -> str:
        """Name of a lane's thread, for messages."""
        return f"thread {lane % self.lanes} of block {self.names[lane // self.lanes]}"

    def state(self) -> list[str]:
        """State of the barriers, for the message of a deadlock."""
        return self.own.state() + self.grid.state()

    def rank_of(self, f: LaneFrame) -> int:
        """Rank of a frame's CTA in its cluster."""
        return int(f.block.rank) % self.mates

    # -- shared memory of other CTAs

    def ranks(self, f: LaneFrame, cta: Value, span: Any) -> Iterator[tuple[int, np.ndarray]]:
        """(rank, mask of the active lanes that name it); each is checked as an access by those lanes."""
        want, active = spread(cta, f.lanes).astype(np.int64), f.active()
        for rank in np.unique(want[active]):
            lanes = active & (want == rank)
            self.enter(f, lanes, int(rank), span)
            yield int(rank), lanes

    def enter(self, f: LaneFrame, lanes: np.ndarray, rank: int, span: Any, copies: bool = False) -> None:
        """These threads access the shared memory of the CTA with this rank.

        copies: they start copies into it, and an mbarrier of the destination reports the end.  Raises sim-cluster.
        """
        if not 0 <= rank < self.mates:
            raise fault("sim-cluster", f"no block of this cluster has rank ‹{rank}›: it has {self.mates}",
                        expected=f"a rank from 0 to {self.mates - 1}", span=span, hint="ranks run from 0 to cluster_size() - 1")
        if rank == self.rank_of(f):
            return
        rank += f.block.rank - self.rank_of(f)
        if rank in self.over:
            raise fault("sim-cluster", f"shared memory of block {self.names[rank]} is accessed after it has ended",
                        found=f"block {self.names[rank]}, which has ended", span=span,
                        hint="cluster_sync() at the end of the kernel keeps every block until the last access")
        who, clocks = np.flatnonzero(lanes), f.block.clocks
        met = (self.own.waits[who] > 0) | (self.grid.waits[who] > 0)
        met |= clocks.seen[who, rank * self.lanes:(rank + 1) * self.lanes].any(1)
        if not met.all():
            raise fault("sim-cluster", f"{self.thread(int(who[~met][0]))} accesses shared memory of ‹block {self.names[rank]}, "
                        "which may not have started›", span=span,
                        hint="cluster_sync() before the first access to another block")
        if not copies:
            self.touched[rank].update((int(t), (int(clocks.now[t]), span)) for t in who)

    def shift(self, f: LaneFrame, rank: int) -> int:
        """Byte distance from a location in the frame's shared memory to the same location in that of CTA `rank`."""
        return (rank - self.rank_of(f)) * self.arena

    def ended(self, coroutine: Any, coroutines: list[Any]) -> None:
        """A coroutine has finished.  Raises sim-cluster or sim-async when its CTA ends too early."""
        self.own.settle(coroutines)
        self.grid.settle(coroutines)
        block = coroutine.frame.block
        rank = block.rank
        if any(not p.done and p.frame.block.rank == rank for p in coroutines):
            return
        self.over.add(rank)
        know = block.clocks.seen[rank * self.lanes:(rank + 1) * self.lanes].max(0)
        for t, (clock, span) in self.touched[rank].items():
            if know[t] < clock:
                raise fault("sim-cluster", f"block {self.names[rank]} may end before {self.thread(t)} has accessed its shared "
                            "memory", found=f"block {self.names[rank]}, which may end before", span=span,
                            hint="cluster_sync() at the end of the kernel keeps every block until the last access")
        for agent, clock, span in self.sources[rank]:
            if know[agent] < clock:
                raise fault("sim-async", f"block {self.names[rank]} may end while a copy reads its shared memory",
                            expected="a copy that has arrived before the block ends", found="one that may be under way",
                            span=span, hint="wait until the copy has arrived (its barrier, then cluster_sync) before the end")
        for at, bar in block.asynchronous.barriers.items():
            last = int(block.clocks.now[bar.agent]) - 1
            if at // self.arena == rank and last > 0 and know[bar.agent] < last:
                raise fault("sim-async", f"block {self.names[rank]} ends while a copy that signals {bar.name} may be under way",
                            expected="a copy that has arrived before the block ends", found="one that may be under way",
                            span=bar.span, hint="wait on the mbarrier of every load before the kernel ends")


def _whole_warps(f: LaneFrame, what: str, span: Any) -> None:
    if not in_whole_warps(f):
        raise fault("sim-warp-divergence", f"{what} is reached by some lanes of a warp only",
                    found=f"{what} in some lanes of a warp", span=span)


def _rank(c: DeviceContext, e: Call) -> Closure:
    dt = numpy_dtype(e.dtype).type
    return lambda f: np.asarray(dt(f.block.cluster.rank_of(f) if e.op == "cluster_rank" else f.block.cluster.mates))


def _barrier(c: DeviceContext, e: Call) -> Action:
    arrives, waits, relaxed = e.op != "cluster_wait", e.op != "cluster_arrive", e.op == "cluster_arrive" and e.options.relaxed

    def run(f: LaneFrame) -> None:
        if arrives:
            f.block.cluster.own.arrive(f, relaxed, e.span)
        if waits:
            f.block.cluster.own.wait(f, e.span)

    return run


def _arrive_remote(c: DeviceContext, e: Call) -> Action:
    """mbarrier_arrive_remote(bar, cta), mbarrier_complete_remote(bar, cta, bytes)."""
    at, cta = Barrier(c, e.args[0], e.span), c.expr(e.args[1])
    nbytes = c.expr(e.args[2]) if len(e.args) > 2 else None

    def run(f: LaneFrame) -> None:
        cluster, own = f.block.cluster, at.reach(f)
        for rank, lanes in cluster.ranks(f, cta(f), e.span):
            for address in np.unique(own[lanes]):
                who = lanes & (own == address)
                bar = at.get(f, int(address) + cluster.shift(f, rank), who)
                bar.know(f.block.clocks.arrive(who))
                if nbytes is None:
                    bar.arrive(int(who.sum()), e.span)
                else:
                    bar.receive(int(spread(nbytes(f), f.lanes)[who].sum()))

    return run


def _access(c: DeviceContext, e: Call) -> Closure:
    """cluster_load(address, cta), cluster_store(address, cta, value): one element."""
    place = shared_operand(e, e.args[0])
    b, dt, stores = place.buffer, numpy_dtype(place.buffer.dtype), e.op == "cluster_store"
    own, cta = c.memory.reach(b, place.indices, dt.itemsize, e.span, e.op), c.expr(e.args[1])
    mode, op = ("write", "st.shared::cluster") if stores else ("read", "ld.shared::cluster")
    access, accesses = c.memory.access(b, dt.itemsize, e.span, mode, op, f"remote {mode}"), c.accesses
    value = c.expr(e.args[2]) if stores else None

    def run(f: LaneFrame) -> Value:
        address, cluster = np.array(own(f)), f.block.cluster
        for rank, lanes in cluster.ranks(f, cta(f), e.span):
            address[lanes] += cluster.shift(f, rank)
        on = f.active()
        flat = f.block.shared.store.flat(dt)
        cells = np.where(on, address, 0) // dt.itemsize
        if value is None:
            accesses.touch(f, 0, address, access)
            return flat[cells]
        v = spread(value(f), f.lanes)
        flat[cells[on]] = v[on]
        held = flat[cells[on]]
        accesses.touch(f, 0, address, access, (held == v[on]) | (held != held))
        return np.int32(0)

    return run


CLUSTER_OPS: dict[str, Callable[[DeviceContext, Call], Closure]] = {
    "cluster_rank": _rank, "cluster_size": _rank, "cluster_load": _access, "cluster_store": _access,
    **effects({"cluster_arrive": _barrier, "cluster_wait": _barrier, "cluster_sync": _barrier,
               "mbarrier_arrive_remote": _arrive_remote, "mbarrier_complete_remote": _arrive_remote}, count_warps)}
