"""Defines the rings of stages between the producer warp group and the consumers, and the pipelined loop that uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from tilelang.ir import (AddressOf, Buffer, Const, Evaluate, Expr, For, If, Launch, Stmt, Var, binary, call, cast, const,
                         convert, dtype, is_const, logical, seq, BufferFacts, BARRIER)
from tilelang.ir.record import state
from tilelang.ops import Copy, Gemm
from tilelang.ops.tma import tma_bytes
from tilelang.target.machine import REGISTERS_PER_SM, WARP_ROLE_REGISTERS, consumer_registers

from ..analysis.statements import do
from ..analysis.effects import effects
from ..framework.pass_ import PassContext
from .pipeline_emit import select_version
from ..analysis.pipeline_schedule import Body, Item
from .clusters import ClusterMap
from .loop_order import LoopOrder

GROUP = 128  # threads of a warp group
SLOW_STAGES = 2  # of a ring whose stages last several iterations each: one in use, one being loaded


@state
class Ring:
    """A ring of stages and the copies that fill it.

    items: the copies, as indices into the loop's items.  first, last: the consumers' items that use them first and last.
    cluster_map: the cluster whose blocks fill each other's stages; None if each block fills its own.  common: copy whose tile
    several blocks load together -> dimensions of the grid along which the tile is the same.  iterations: how many iterations
    a stage lasts (prefetch_scales.py), counted from the first.
    """

    items: list[int]
    first: int
    last: int
    buffers: dict[Buffer, Buffer] = field(default_factory=dict)  # user's buffer -> buffer with one version per stage
    full: Buffer | None = None
    empty: Buffer | None = None
    cluster_map: ClusterMap | None = None
    common: dict[int, frozenset[int]] = field(default_factory=dict)
    iterations: int = 1

    @property
    def fillers(self) -> int:
        """Number of blocks that fill the stages of a block."""
        return 1 if self.cluster_map is None else self.cluster_map.peers(self.common.values())[0]

    def cluster_split(self, item: int) -> tuple[Expr, int, Expr] | None:
        """How the blocks of a cluster load a copy's tile together; None if they do not.

        (index of a block among those that load it, their number, mask of their ranks).
        """
        same = self.common.get(item)
        if self.cluster_map is None or same is None:
            return None
        return self.cluster_map.sharer(same), len(self.cluster_map.sharers(same)), cast(self.cluster_map.mask(same), "uint16")

    def bytes(self, items: list[Item]) -> int:
        return sum(tma_bytes(items[i].stmt) for i in self.items)


@state
class WarpRoleLoop:
    """A pipelined loop that is divided between producer and consumers.

    groups: number of consumer warp groups.  thread: index of a thread in the block.  base: steps that the loop's rings have
    made before its first iteration, modulo twice the stages; None for zero.  repeated: the loop runs once for each tile of a
    block and must release all stages before it ends.  slow_bases: iterations per stage of a slow ring -> its `base`.
    made: storage of operands that the threads make -> its versions.  overlap: text for the report, set when the consumers'
    schedule has been made.  order: the chosen order of the consumers' statements; None until it is asked for, False where
    another schedule is taken.  beside: blocks that an SM runs at once.
    """

    launch: Launch
    loop: For
    body: Body
    rings: list[Ring]
    groups: int
    stages: int
    thread: Var
    cx: PassContext
    base: Expr | None = None
    repeated: bool = False
    slow_bases: Mapping[int, Expr | None] = field(default_factory=dict)
    made: Mapping[Var, int] = field(default_factory=dict)
    overlap: str = ""
    order: LoopOrder | Literal[False] | None = None
    beside: int = 1

    @property
    def slow(self) -> list[Ring]:
        """The rings whose stages last several iterations."""
        return [r for r in self.rings if r.iterations > 1]

    @property
    def loads(self) -> set[int]:
        """Indices of the items that the producer runs."""
        return {i for r in self.rings for i in r.items}

    @property
    def versions(self) -> dict[Buffer, Buffer]:
        return {b: v for r in self.rings for b, v in r.buffers.items()}

    @property
    def consumer_registers(self) -> int:
        """The number of registers that a consumer thread may use."""
        return consumer_registers(self.groups)

    def stages_of(self, iterations: int) -> int:
        """Number of stages of the rings whose stages last `iterations` iterations."""
        return self.stages if iterations == 1 else SLOW_STAGES

    def step(self, k: Expr, iterations: int = 1) -> Expr:
        """How many stages the rings have filled before that of iteration k (modulo twice the stages)."""
        done = self.done(k) if iterations == 1 else self.done(k) // iterations
        base = self.base if iterations == 1 else self.slow_bases.get(iterations)
        return done if base is None else base + done

    def done(self, k: Expr) -> Expr:
        """The number of iterations before iteration k."""
        return k if is_const(self.loop.start, 0) else k - self.loop.start

    def slot(self, k: Expr, iterations: int = 1) -> tuple[Expr, Expr]:
        """(stage, parity of its mbarrier phase) of iteration k."""
        step, stages = self.step(k, iterations), self.stages_of(iterations)
        return step % stages, cast(step // stages % 2, "uint32")

    def select(self, s: Any, k: Expr) -> Any:
        """A statement of iteration k: every access of a tile is redirected to its stage."""
        for iterations in dict.fromkeys(r.iterations for r in self.rings):
            tiles = {b: v for r in self.rings if r.iterations == iterations for b, v in r.buffers.items()}
            s = select_version(s, tiles, self.step(k, iterations))
        return s

    def filled(self, item: int, k: Expr) -> list[Stmt]:
        """Waits for the stages that `item` is the first to use in iteration k."""
        slot, parity = self.slot(k)
        return [do("mbarrier_wait", AddressOf(r.full, (slot,)), parity) for r in self.rings
                if r.first == item and r.full is not None and r.iterations == 1]

    def using(self, stmts: list[Stmt], items: list[int], k: Expr) -> list[Stmt]:
        """Statements of iteration k with the waits and releases of the slow rings that they use.

        items: the items that the statements belong to.  A stage is waited for in its first iteration and released in its
        last one.
        """
        before: list[Stmt] = []
        after: list[Stmt] = []
        for ring in self.slow:
            slot, parity = self.slot(k, ring.iterations)
            if ring.first in items and ring.full is not None:
                before += self._when(k, ring.iterations, 0, [do("mbarrier_wait", AddressOf(ring.full, (slot,)), parity)])
            if ring.last in items:
                after += self._when(k, ring.iterations, ring.iterations - 1, self.release(ring, slot))
        return [*before, *stmts, *after]

    def _when(self, k: Expr, iterations: int, place: int, stmts: list[Stmt]) -> list[Stmt]:
        """Runs statements only in iteration number `place` of a stage; the last place includes the loop's last iteration."""
        at = self.done(k) % iterations
        cond = binary("eq", at, const(place, at.dtype))
        extent = convert(self.loop.extent)
        if place and not (isinstance(extent, Const) and int(extent.value) % iterations == 0):
            cond = logical("or", cond, binary("eq", k, convert(self.loop.start) + extent - 1))
        return [If(cond, seq(*stmts))]

    def release(self, ring: Ring, slot: Expr) -> list[Stmt]:
        """Releases a stage: each warp arrives once, after all its threads have read the stage."""
        return [*self.read_out(set(ring.buffers)), do("sync_warp"), self.released(ring, slot)]

    def release_after_wait(self, ring: Ring, slot: Expr, when: Expr) -> list[Stmt]:
        """Releases a stage behind a wait for wgmma under a condition.  The wait has ordered the warps of the group; only loads
        by threads need more."""
        own = self.read_out(set(ring.buffers))
        return [*own, *([do("sync_warp")] if own else ()), self.released(ring, slot, when)]

    def used_outside(self, storage: Var) -> bool:
        """Whether the launch accesses the memory before or after the loop."""
        inside = sum(e.storage is storage for e in effects(self.loop))
        return sum(e.storage is storage for e in effects(self.launch.body)) > inside

    def read_out(self, tiles: set[Buffer]) -> list[Stmt]:
        """What has to precede an arrival that releases tiles: it orders a thread's own loads from them before the arrival.

        An arrival does not wait for loads in flight, and the next copy into the tile goes through another proxy.  Seen on an
        H200: when wgmma used the full bandwidth of shared memory, the copy overtook the loads in a third of the launches.
        """
        storage = {b.data for b in tiles}
        own = any(e.storage in storage and not isinstance(e.node, (Copy, Gemm)) or _by_threads(e.node, storage)
                  for e in effects(self.launch.body))
        return [do("fence_proxy_async")] if own else []

    def released(self, ring: Ring, slot: Expr, when: Expr | None = None) -> Stmt:
        """The arrival of a warp whose threads have all reached this point.  when: a condition for the arrival."""
        assert ring.empty is not None
        bar = AddressOf(ring.empty, (slot,))
        if ring.cluster_map is None:
            cond, arrive = self.leader(), do("mbarrier_arrive", bar)
        else:
            # One thread arrives at each block that fills a piece of the stage, this block included.  A stage is full again
            # only after all these blocks have seen its release, so an arrival never counts for an earlier phase.
            lane, (count, mask) = self.thread % 32, ring.cluster_map.peers(ring.common.values())
            rank = cast(lane, "uint32")
            cond = binary("lt", lane, const(count, lane.dtype)) if mask is None else binary(
                "ne", binary("bitand", binary("shr", mask, rank), const(1, "uint32")), const(0, "uint32"))
            arrive = do("mbarrier_arrive_remote", bar, rank)
        return If(cond if when is None else logical("and", when, cond), arrive)

    def arrive(self, empty: Buffer, slot: Expr) -> list[Stmt]:
        """Each warp arrives once, after all its threads have reached this point."""
        return [do("sync_warp"), If(self.leader(), do("mbarrier_arrive", AddressOf(empty, (slot,))))]

    def leader(self) -> Expr:
        """Condition that selects one thread of each warp."""
        return binary("eq", self.thread % 32, const(0, self.thread.dtype))


def _by_threads(op: Any, storage: set[Var]) -> bool:
    """Whether an op is a copy whose threads load from one of these buffers themselves."""
    return isinstance(op, Copy) and op.src.buffer.data in storage


def barriers(name: str, counts: tuple[int, ...]) -> Buffer:
    """A buffer of mbarriers with these arrival counts."""
    return Buffer(name, (len(counts),), dtype("uint64"), BARRIER, facts=BufferFacts(arrive=counts))


def pin(b: Buffer) -> Stmt:
    """Statement wgmma_pin of a fragment."""
    return Evaluate(call("wgmma_pin", (AddressOf(b, tuple(const(0) for _ in b.shape)),), "void"))


def hold(b: Buffer) -> Stmt:
    """Statement wgmma_hold of a fragment."""
    return Evaluate(call("wgmma_hold", (AddressOf(b, tuple(const(0) for _ in b.shape)),), "void"))


def asked_registers(launch: Launch, groups: int) -> tuple[int, int] | None:
    """(producer's, consumers') registers per thread that the program requests.

    None if it requests none, or if they do not fit the registers of the launch: a setmaxnreg that raises the count waits for
    free registers, and would then wait for ever.
    """
    default = WARP_ROLE_REGISTERS.get(groups)
    asked = launch.plan.producer_registers, launch.plan.consumer_registers
    if default is None or asked == (None, None):
        return None
    producer, consumer = (int(a or d) for a, d in zip(asked, default))
    whole = REGISTERS_PER_SM // (GROUP * (groups + 1)) // 8 * 8
    fits = producer + groups * consumer <= (groups + 1) * whole and producer <= whole <= consumer
    return (producer, consumer) if fits else None


__all__ = ["GROUP", "Ring", "SLOW_STAGES", "WarpRoleLoop", "asked_registers", "barriers", "hold", "pin"]
