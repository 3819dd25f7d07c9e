"""Barriers in the reference interpreter: mbarriers, named barriers, barriers and votes of a block, barriers of a grid.

Threads that execute a barrier are counted for their warp role (block.py).  Without warp roles all threads of a block are in
step, and a wait that is not satisfied is a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Expr, numpy_dtype, BARRIER
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.warp_groups import holds_in
from tilelang.target.thread_calls import WARP

from .block import TileBlock
from .cluster import CLUSTER_OPS, cluster_of_frame
from .context import TileContext
from .warp_roles import executing, whole_warp_role
from ..faults import fault
from ..lane_ops import VOTES_OF_BLOCKS, effects, elect, nothing, spread
from ..lanes import Action, LaneFrame, uniform
from ..mbarrier import Phases, arrivals
from ..rank_ops import COMPARE, why_waits


class TileBarrier:
    """An operand that names one mbarrier: AddressOf(buffer, (index,)), or (buffer, index) of a Copy's plan."""

    def __init__(self, c: TileContext, buffer: Any, index: Any, span: Any) -> None:
        self.slot, self.buffer, self.span = c.slot(buffer.data), buffer, span
        self.index = c.expr(index) if isinstance(index, Expr) else (lambda f: np.asarray(index))

    @staticmethod
    def of(c: TileContext, a: Any, span: Any) -> TileBarrier:
        if not isinstance(a, AddressOf) or a.buffer.scope() != BARRIER:
            raise fault("sim-unsupported", "an mbarrier is given as «the address of a shared.barrier element»",
                        found="another operand", span=span)
        return TileBarrier(c, a.buffer, a.indices[0], span)

    def get(self, f: LaneFrame, rank: int | None = None, fresh: bool = False) -> Phases:
        """The mbarrier.  rank: of another block of the cluster.  fresh: it may lack a count; else that raises sim-mbarrier."""
        bars = f.slots[self.slot]
        if rank is not None:
            bars = barriers_of(cluster_of_frame(f, self.span).block(rank, self.span), self.buffer, self.span)
        k = int(uniform(self.index(f), f, "the number of an mbarrier", self.span))
        if not 0 <= k < len(bars):
            raise fault("sim-out-of-bounds", f"mbarrier {self.buffer.name}[‹{k}›] is outside its shape ({len(bars)})",
                        expected=f"an index below {len(bars)}", span=self.span)
        if not bars[k].count and not fresh:
            raise fault("sim-mbarrier", f"{bars[k].name} is used before mbarrier_init",
                        expected="mbarrier_init before its use", found="none", span=self.span)
        return bars[k]


def _init(c: TileContext, e: Call) -> Action:
    """mbarrier_init, for barriers whose buffer has no counts (attr `arrive`): the program initialises them itself."""
    bar, count = TileBarrier.of(c, e.args[0], e.span), c.expr(e.args[1])
    if bar.buffer.facts.arrive is not None:
        return lambda f: None

    def run(f: LaneFrame) -> None:
        b = bar.get(f, fresh=True)
        b.count = b.pending = arrivals(uniform(count(f), f, "the count of an mbarrier", e.span), e.span)
        b.phase = b.tx = 0

    return run


def _arrive(c: TileContext, e: Call) -> Action:
    """mbarrier_arrive, mbarrier_expect_tx, mbarrier_arrive_expect_tx, for every thread that executes it."""
    bar = TileBarrier.of(c, e.args[0], e.span)
    nbytes = c.expr(e.args[1]) if e.op.endswith("expect_tx") else None
    arrives = e.op != "mbarrier_expect_tx"

    def run(f: LaneFrame) -> None:
        b, n = bar.get(f), executing(f)
        if nbytes is not None:
            b.tx += n * int(uniform(nbytes(f), f, "a number of bytes", e.span))
        if arrives:
            b.arrive(n, e.span)

    return run


def _copies_arrive(c: TileContext, e: Call) -> Action:
    """cp_async_mbarrier_arrive: copies are already complete, so counted threads arrive; otherwise nothing changes."""
    bar, counted = TileBarrier.of(c, e.args[0], e.span), e.options.noinc

    def run(f: LaneFrame) -> None:
        if counted:
            bar.get(f).arrive(executing(f), e.span)

    return run


def _arrive_remote(c: TileContext, e: Call) -> Action:
    """mbarrier_arrive_remote(bar, cta)."""
    bar, cta = TileBarrier.of(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> None:
        ranks = np.asarray(cta(f))
        if ranks.ndim == 0:
            bar.get(f, int(ranks)).arrive(executing(f), e.span)
        else:  # the lanes of a warp may signal different blocks
            for rank, n in zip(*np.unique(ranks[f.active()], return_counts=True)):
                bar.get(f, int(rank)).arrive(int(n), e.span)

    return run


def _wait(c: TileContext, e: Call) -> Action:
    bar, parity = TileBarrier.of(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> None:
        b, p = bar.get(f), int(uniform(parity(f), f, "a parity", e.span))
        f.block.wait(lambda: b.passed(p), lambda: f"for parity {p} of {b.state()}", e.span)

    return run


def _sync(c: TileContext, e: Call) -> Action:
    """sync_threads, named_barrier, named_barrier_arrive.  Without warp roles the threads of a block are always in step."""
    members = c.members
    args = [c.expr(a) for a in e.args]
    warp_roles = {r: c.launch.warp_roles[r].threads for r in members}

    def run(f: LaneFrame) -> None:
        if e.op == "sync_threads":
            whole_warp_role(f, "this barrier", e.span)
            if c.launch.warp_roles:
                f.block.gather(("sync", members), f.warp_role, warp_roles, e.span, "a block barrier")
        else:
            number, need = (int(uniform(a(f), f, "a barrier's operand", e.span)) for a in args)
            f.block.meet(number, need, _in_warps(f), e.span, f"barrier {number}", e.op == "named_barrier")

    return run


def _block_vote(c: TileContext, e: Call) -> Closure:
    """syncthreads_count, _and, _or: the threads of all warp roles that reach the call synchronise there."""
    members, value, answer_of = c.members, c.expr(e.args[0]), VOTES_OF_BLOCKS[e.op]
    warp_roles, key = {r: c.launch.warp_roles[r].threads for r in members}, ("votes", id(e))

    def run(f: LaneFrame) -> Value:
        given = spread(value(f), f.lanes)[f.active()] != 0
        if len(members) < 2 or not len(given):
            return np.int32(answer_of(given))
        votes = f.block.once(key, f.warp_role, list)
        votes.append(given)
        whole_warp_role(f, "a vote of the block", e.span)
        f.block.gather((key, f.warp_role.counts[key]), f.warp_role, warp_roles, e.span, "a vote of the block")
        return np.int32(answer_of(np.concatenate(votes)))

    return run


def _sync_grid(c: TileContext, e: Call) -> Action:
    """sync_grid, which all threads of a block execute together."""

    def run(f: LaneFrame) -> None:
        grid = f.block.scheduler
        if grid is None:  # a grid of one block
            return
        if f.mask is not None and not f.active().all() and f.lanes > 1:
            gone = 0 if f.exited is None else int(f.exited.sum())
            if int(f.active().sum()) < f.warp_role.threads - gone:
                came = f"{int(f.active().sum())} of {f.warp_role.threads - gone} threads"
                raise fault("sim-barrier", f"{came} reach this barrier of the grid", found=came, span=e.span,
                            hint="a barrier must not stand under a condition that differs between threads")
        grid.meet(e.span)

    return run


def _in_groups(c: TileContext, e: Call) -> Closure:
    return lambda f: np.bool_(holds_in(e, f.warp_role.warps[0]))


def _in_warps(f: LaneFrame) -> int:
    """The same count for a barrier with a thread count, which counts a warp as 32 threads: PTX ISA, "bar"."""
    if f.lanes == 1:
        return -(-f.warp_role.threads // WARP) * WARP
    return WARP * int(f.active().reshape(-1, WARP).any(1).sum())


def barriers_of(block: TileBlock, b: Any, span: Any) -> list[Phases]:
    """The mbarriers of a shared.barrier buffer in a block, created in phase 0 at the first use.

    Without counts (attr `arrive`) the counts are 0 until mbarrier_init.  Raises sim-mbarrier unless each has one or none has.
    """
    got = block.named.get(id(b))
    if got is not None:
        return got
    counts = b.facts.arrive or (0,) * math.prod(b.shape)
    if len(counts) != math.prod(b.shape):
        raise fault("sim-mbarrier", f"{b.name} has no arrival count for each of its barriers",
                    expected="an arrival count for each barrier", found=str(len(counts)), span=span,
                    hint="a shared.barrier buffer has the attribute arrive, one count a barrier")
    of = f" of block {block.where}" if block.cluster is not None else ""
    made = [Phases(f"{b.name}[{i}]{of}", int(n)) for i, n in enumerate(counts)]
    block.barriers += made
    block.named[id(b)] = made
    return made


def _wait_signal(c: TileContext, e: Call) -> Callable[[LaneFrame], np.ndarray]:
    """wait_signal: the value of each executing thread's flag once it compares so."""
    place: Any = e.args[0]
    dt, compare, value = numpy_dtype(place.buffer.dtype), COMPARE[e.options.compare], c.expr(e.args[1])
    where = c.memory.locate(place.buffer, place.indices, 1, e.span, True)

    def run(f: LaneFrame) -> np.ndarray:
        store, _, _, linear, _ = where(f)
        on = f.active()
        flat, cells, want = store.flat(dt), spread(linear, f.lanes)[on], spread(value(f), f.lanes)[on].astype(dt)
        f.block.wait(lambda: bool(compare(flat[cells], want).all()), lambda: why_waits(
            e, f.block.device, flat[cells[0]], want[0]), e.span)
        found = np.zeros(f.lanes, dt)
        found[on] = flat[cells]
        return found

    return run


# Operations that only order accesses or assign registers: no effect where everything is synchronous.
ORDER_ONLY = frozenset({
    "fence_mbarrier_init", "fence_proxy_async", "fence_proxy_async_global", "fence_gpu", "fence_block", "wgmma_fence",
    "wgmma_commit", "wgmma_wait", "wgmma_pin", "wgmma_hold", "set_max_nreg", "bulk_commit", "bulk_wait", "tma_prefetch",
    "sync_warp", "cp_async_commit", "cp_async_wait", "wait_loads",
    "wait_shared", "wave_priority", "loads_between", "keep_branch", "pdl_trigger", "pdl_sync", "fence_sys",
    "prefetch_l2"})  # fmt: skip
SYNC_OPS = ("sync_threads", "named_barrier", "named_barrier_arrive")
BARRIER_OPS: dict[str, Callable[[TileContext, Call], Closure]] = {
    **effects({"mbarrier_init": _init, "cp_async_mbarrier_arrive": _copies_arrive, "mbarrier_wait": _wait,
               "mbarrier_arrive_remote": _arrive_remote, "sync_grid": _sync_grid, "wait_signal": _wait_signal,
               **dict.fromkeys(SYNC_OPS, _sync),
               **dict.fromkeys(("mbarrier_arrive", "mbarrier_expect_tx", "mbarrier_arrive_expect_tx"), _arrive)}),
    **CLUSTER_OPS, "elect_one": elect, "in_warp_groups": _in_groups, **dict.fromkeys(ORDER_ONLY, nothing),
    **dict.fromkeys(VOTES_OF_BLOCKS, _block_vote)}
