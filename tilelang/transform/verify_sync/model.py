"""The synchronisation model: the warp groups of a block run concurrently, for one choice of the unknown values.

Every stream (a warp group; or a warp, where warps of a group wait for each other) is a generator, and the model runs each
until it waits.  Faults follow from the happens-before order (clocks.py), not from the order of this run.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Buffer, Var
from tilelang.target.machine import REGISTERS_PER_SM
from tilelang.ir.record import record

from tilelang.target.cluster import cluster_of
from tilelang.target.warp_groups import WARP_LANES

from .sync_fault import Fault, Found, Undecided
from .clocks import Clocks, MBarrier, NamedBarrier, Warp
from .memory import Memory
from .plan import Plan
from .stream import Stream
from .stream_state import StreamState
from .unknowns import Unknowns
from .values import Marked, Values

GROUP = 128
ROOM, MUCH_ROOM = 6, 128  # subsets of a warp that are tracked separately: the second costs time, and few programs need it
_MOST_STEPS, _MOST_EXACT = 400_000, 40_000  # events of a run; of a run that leaves out no iterations
_MOST_FAULTS = 8


class Block:
    """One block: its warps, barriers and shared memory.  rank: its rank in the cluster."""

    def __init__(self, model: Model, env: dict[Var, Any], width: int, rank: int) -> None:
        self.model, self.plan, self.values, self.env = model, model.plan, model.values, env
        self.clocks, self.rank = model.clocks, rank
        n = self.plan.launch.num_threads
        self.lanes = model.lanes
        count = -(-n // self.lanes)
        of = f" of block {rank}" if model.size > 1 else ""
        self.of = of
        self.warps = [Warp(self.clocks, rank * count + k, min(self.lanes, n - self.lanes * k), f"warp {k}{of}")
                      for k in range(count)]
        warps = model.size * count, self.lanes
        self.memory = Memory(self.plan.granule, warps, self.clocks, self.plan.names(), self.report)
        self.barriers: dict[int, MBarrier] = {}
        self._named: dict[int, NamedBarrier] = {}
        self.accesses, self.unknown = 0, 0  # of these at unknown addresses
        self.remote: list[tuple[int, int, Any]] = []  # component, time and span of accesses by other blocks
        blocks = self.plan.launch.plan.min_blocks_per_sm
        self.registers = min(REGISTERS_PER_SM // (n * blocks) // 8 * 8, 255)  # of a thread when the block starts
        self.spare = 0  # registers that warp groups gave back
        self.streams_are_groups = width == GROUP
        self.streams = [Stream(StreamState(self, first, min(width, n - first))) for first in range(0, n, width)]

    def report(self, fault: Fault) -> None:
        """End the run with a fault.  With unknown numbers it goes on: what other threads ask of them is to be known too."""
        if self.model.unknowns is None:
            raise Found(fault)
        faults = self.model.faults
        if len(faults) < _MOST_FAULTS or fault.exact and not any(f.exact for f in faults):
            faults.append(fault)

    def named(self, number: int) -> NamedBarrier:
        """The barrier of a number, 0 to 15."""
        got = self._named.get(number)
        if got is None:
            got = self._named[number] = NamedBarrier(
                f"barrier {number}{self.of}" if number else f"the block barrier{self.of}", self.clocks)
        return got

    def element(self, b: Buffer, at: int) -> str:
        """Name of the mbarrier at a byte."""
        return f"{b.name}[{(at - self.plan.places[b.data]) // 8}]{self.of}"

    def barrier(self, at: int, b: Buffer, span: Any) -> MBarrier:
        """The mbarrier at a byte.  Raises Found when it was not initialised."""
        got = self.barriers.get(at)
        if got is None:
            if 0 <= (at - self.plan.places[b.data]) // 8 < int(b.shape[0]):
                raise Found(Fault(f"{self.element(b, at)} is used before mbarrier_init", span, kind="mbarrier"))
            text = f"{self.element(b, at)} may be used, and `{b.name}` has {b.shape[0]} mbarriers"
            raise Found(Fault(text, span, kind="index"))
        return got

    def finish(self) -> None:
        """Raises Found when an operation is still incomplete at the end."""
        rows = [w.known(w.full)[0] for w in self.warps]
        rows += [w.known(lanes)[0] for w in self.warps for lanes in w.seen]
        for b in self.barriers.values():
            if self.clocks.now[b.copies] and not any(r[b.copies] >= self.clocks.now[b.copies] for r in rows):
                raise Found(Fault(f"the block may end while a copy that signals {b.name} is in flight", b.last_copy,
                                  kind="ending"))
        for c, t, span in self.remote:
            if not any(r[c] >= t for r in rows):
                raise Found(Fault(f"block {self.rank} may end before another block of its cluster has accessed its shared "
                                  "memory", span, kind="ending"))
        for s in self.streams:
            for own in s.st.bulk.values():
                if own.finished < own.time:
                    raise Found(Fault("the block may end while a bulk store reads its shared memory: no bulk_wait",
                                      own.span, kind="ending"))


@record
class Way:
    """Which iterations of loops are followed.

    whole: ring loops of at most this many iterations are followed completely; longer ones leave out whole periods of the
    rings.  later: additional iterations followed before iterations are left out.  tiles: fewest followed iterations of loops
    around ring loops.  every_tile: whether `whole` applies to those loops too.  room: subsets of a warp's lanes
    whose accesses are tracked separately.  votes: whether two of three votes of the block that decide about synchronisation
    hold, else none.
    """

    whole: int = 1
    later: int = 0
    every_tile: bool = True
    tiles: int = 3
    room: int = ROOM
    votes: bool = True


AS_WRITTEN = Way()


class Model:
    """One run of the model.

    env: values of block variables, symbols and scalars.  scale: of integers read from global tensors.  width: threads of a
    stream.  way: which iterations are followed.
    unknowns: assumptions about what `env` and `scale` do not give, None where these give all that orders threads.  faults: of a
    run with unknowns.
    """

    def __init__(self, plan: Plan, values: Values, env: dict[Var, Any], scale: int | Marked, width: int = GROUP,
                 way: Way = AS_WRITTEN, unknowns: Unknowns | None = None) -> None:
        self.plan, self.values, self.scale, self.way, self.unknowns = plan, values, scale, way, unknowns
        self.progress, self.cut = 0, False
        self.faults: list[Fault] = []
        self._left_out: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        dims = cluster_of(plan.launch) or (1, 1, 1)
        self.size = dims[0] * dims[1] * dims[2]
        # With unknown numbers only block barriers order threads: all of them are tracked like one warp.
        self.lanes = WARP_LANES if unknowns is None else -(-plan.launch.num_threads // WARP_LANES) * WARP_LANES
        warps = -(-plan.launch.num_threads // self.lanes)
        mbarriers = sum(int(b.shape[0]) for b in plan.barriers)
        self.clocks = Clocks(self.size * (way.room * warps + 2 * mbarriers + 32))
        self.blocks: list[Block] = []
        self.cluster = NamedBarrier("the cluster barrier", self.clocks)
        for rank in range(self.size):
            place = (rank % dims[0], rank // dims[0] % dims[1], rank // (dims[0] * dims[1]))
            own = {v: env[v] // d * d + k for v, d, k in zip(plan.launch.block_vars, dims, place)}
            self.blocks.append(Block(self, {**env, **own}, width, rank))

    def left_out(self, where: tuple[int, ...], end: int, least: int) -> int:
        """Iterations that a ring loop of `end` iterations leaves out: whole periods of the rings.

        At least `least` iterations are followed.  The lengths of loops of different warp roles over the same iterations may
        differ
        by what one of them handles separately; such loops leave out the same iterations.  where: identifies the loop (block,
        tile); its last entry is the period.
        """
        known = self._left_out.setdefault(where, [])
        for other, n in known:
            if abs(other - end) <= 2:
                return n
        known.append((end, max(0, end - least) // where[-1] * where[-1]))
        return known[-1][1]

    def run(self) -> Model:
        """Run the program and return the model.  Raises Found and Undecided."""
        body = self.plan.launch.body
        live = {s: s.run(body) for b in self.blocks for s in b.streams}
        while live:
            before = self.progress
            for s, way in list(live.items()):
                try:
                    s.waiting = next(way)
                except StopIteration:
                    del live[s]
                    self.progress += 1
                if self.progress > (_MOST_STEPS if self.way.whole == 1 else _MOST_EXACT):
                    raise Undecided("its loops run too often to be followed step by step")
            if live and self.progress == before:
                raise self._deadlock(list(live))
        for b in self.blocks:
            b.finish()
        return self

    def forget(self) -> None:
        """Empty the blocks, whose memory and streams name them: they would live until the garbage collector runs."""
        for b in self.blocks:
            vars(b).clear()

    def _deadlock(self, stuck: list[Stream]) -> Found:
        who = "; ".join(f"threads {s.st.first} to {s.st.first + s.st.n - 1}{s.st.block.of} wait {s.waiting[2]}" for s in stuck)
        bars = {id(s.waiting[1]): s.waiting[1].state() for s in stuck}
        return Found(Fault(f"the block comes to a standstill: {who} ({'; '.join(bars.values())})", stuck[0].waiting[0],
                           None, True, True, "stuck"))
