"""Warp roles in the reference interpreter: warp groups that run different code, and the mbarriers between them.

Warp groups that no `in_warp_groups` condition distinguishes form one warp role.  Each warp role runs the body on its own
and waits at barriers.  A tile op or barrier outside such conditions is executed once, by all warp roles that reach it; a
shared or fragment buffer declared there is one buffer.  TMA copies (Copy with tma, barrier) complete at once and signal
their bytes.  Without warp roles, a wait that is not satisfied is a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Call, Expr, For, If, Launch, Load, Parallel, Region, Seq, Stmt, Store, TileOp, While,
                         convert, walk, BARRIER, SHARED, PRIVATE)
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.warp_groups import GROUP, alike, holds_in

from ..faults import fault
from ..lane_ops import BLOCK_VOTES, WARP
from ..lanes import Action, LaneFrame, uniform
from ..mbarrier import Phases
from .block import WarpRole, TileBlock, TileScheduler, nth
from .cluster import CLUSTER_OPS, cluster_of_frame
from .divergence import Parting
from .watch import Watch

# Device operations that only order accesses or assign registers: no effect where everything is synchronous.
NO_EFFECT = frozenset({
    "fence_mbarrier_init", "fence_proxy_async", "fence_proxy_async_global", "wgmma_fence",
    "wgmma_commit", "wgmma_wait", "wgmma_pin", "wgmma_hold", "set_max_nreg", "bulk_commit", "bulk_wait",
    "tma_prefetch"})  # fmt: skip


def warp_roles_of(s: Launch) -> list[WarpRole]:
    """The warp roles of a launch, [] when nothing distinguishes its warp groups."""
    if not any(isinstance(n, Call) and n.op == "in_warp_groups" for n in walk(s.body)):
        return []
    return [WarpRole(i, groups, sum(min(GROUP, s.num_threads - GROUP * g) for g in groups))
            for i, groups in enumerate(alike(s))]


def executing(f: LaneFrame) -> int:
    """Number of threads that execute a statement: all of the warp role where threads are not distinguished."""
    if f.lanes == 1:
        return f.role.threads
    return int(f.active().sum())


def whole_warp_role(f: LaneFrame, what: str, span: Any) -> None:
    """Raises sim-barrier unless all threads of the warp role that have not returned are active."""
    here, gone = executing(f), 0 if f.exited is None else int(f.exited.sum())
    if here + gone < f.role.threads:
        came = f"{here} of {f.role.threads - gone} threads"
        raise fault("sim-barrier", f"{came} of {f.role.name} reach {what}", found=came, span=span,
                    hint="a barrier must not stand under a condition that differs between threads")


def _in_warps(f: LaneFrame) -> int:
    """The same count for a barrier with a thread count, which counts a warp as 32 threads: PTX ISA, "bar"."""
    if f.lanes == 1:
        return -(-f.role.threads // WARP) * WARP
    return WARP * int(f.active().reshape(-1, WARP).any(1).sum())


# ---- calls ----------------------------------------------------------------------------------------------------------


class TileBarrier:
    """An operand that names one mbarrier: AddressOf(buffer, (index,)), or (buffer, index) of a Copy's plan."""

    def __init__(self, c: Any, buffer: Any, index: Any, span: Any) -> None:
        self.slot, self.buffer, self.span = c.slot(buffer.data), buffer, span
        self.index = c.expr(index) if isinstance(index, Expr) else (lambda f: np.asarray(index))

    @staticmethod
    def of(c: Any, a: Any, span: Any) -> TileBarrier:
        if not isinstance(a, AddressOf) or a.buffer.scope() != BARRIER:
            raise fault("sim-unsupported", "an mbarrier is given as the address of a shared.barrier element",
                        expected="the address of a shared.barrier element", found="another operand", span=span)
        return TileBarrier(c, a.buffer, a.indices[0], span)

    def get(self, f: LaneFrame, rank: int | None = None, fresh: bool = False) -> Phases:
        """The mbarrier.  rank: of another block of the cluster.  fresh: it may lack a count; else that raises sim-mbarrier."""
        bars = f.slots[self.slot]
        if rank is not None:
            bars = barriers_of(cluster_of_frame(f, self.span).block(rank, self.span), self.buffer, self.span)
        k = int(uniform(np.asarray(self.index(f)), f, "the number of an mbarrier", self.span))
        if not 0 <= k < len(bars):
            raise fault("sim-out-of-bounds", f"mbarrier {self.buffer.name}[{k}] is outside its shape ({len(bars)})",
                        expected=f"an index below {len(bars)}", found=str(k),
                        span=self.span)
        if not bars[k].count and not fresh:
            raise fault("sim-mbarrier", f"{bars[k].name} is used before mbarrier_init",
                        expected="mbarrier_init before its use", found="none", span=self.span)
        return bars[k]


def _init(c: Any, e: Call) -> Closure:
    """mbarrier_init, for barriers whose buffer has no counts (attr `arrive`): the program initialises them itself."""
    bar, count = TileBarrier.of(c, e.args[0], e.span), c.expr(e.args[1])
    if bar.buffer.facts.arrive is not None:
        return lambda f: np.int32(0)

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            b = bar.get(f, fresh=True)
            b.count = b.pending = int(uniform(np.asarray(count(f)), f, "the count of an mbarrier", e.span))
            b.phase = b.tx = 0
        return np.int32(0)

    return run


def _arrive(c: Any, e: Call) -> Closure:
    """mbarrier_arrive, mbarrier_expect_tx, mbarrier_arrive_expect_tx, for every thread that executes it."""
    bar = TileBarrier.of(c, e.args[0], e.span)
    nbytes = c.expr(e.args[1]) if e.op.endswith("expect_tx") else None
    arrives = e.op != "mbarrier_expect_tx"

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            b, n = bar.get(f), executing(f)
            if nbytes is not None:
                b.tx += n * int(uniform(np.asarray(nbytes(f)), f, "a number of bytes", e.span))
            if arrives:
                b.arrive(n, e.span)
        return np.int32(0)

    return run


def _copies_arrive(c: Any, e: Call) -> Closure:
    """cp_async_mbarrier_arrive: copies are already complete, so counted threads arrive; otherwise nothing changes."""
    bar, counted = TileBarrier.of(c, e.args[0], e.span), e.options.noinc

    def run(f: LaneFrame) -> Value:
        if counted and f.any_active():
            bar.get(f).arrive(executing(f), e.span)
        return np.int32(0)

    return run


def _arrive_remote(c: Any, e: Call) -> Closure:
    """mbarrier_arrive_remote(bar, cta)."""
    bar, cta = TileBarrier.of(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            ranks = np.asarray(cta(f))
            if ranks.ndim == 0:
                bar.get(f, int(ranks)).arrive(executing(f), e.span)
            else:  # the lanes of a warp may signal different blocks
                for rank, n in zip(*np.unique(ranks[f.active()], return_counts=True)):
                    bar.get(f, int(rank)).arrive(int(n), e.span)
        return np.int32(0)

    return run


def _wait(c: Any, e: Call) -> Closure:
    bar, parity = TileBarrier.of(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            b, p = bar.get(f), int(uniform(np.asarray(parity(f)), f, "a parity", e.span))
            f.block.wait(lambda: b.passed(p), lambda: f"for parity {p} of {b.state()}", e.span)
        return np.int32(0)

    return run


def _sync(c: Any, e: Call) -> Closure:
    """sync_threads, named_barrier, named_barrier_arrive.  Without warp roles the threads of a block are always in step."""
    members = c.members
    args = [c.expr(a) for a in e.args]
    roles = {r: c.roles[r].threads for r in members}
    if e.op == "sync_threads" and not c.roles:
        return lambda f: np.int32(0)

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            if e.op == "sync_threads":
                whole_warp_role(f, "this barrier", e.span)
                f.block.gather(("sync", members), f.role, roles, e.span, "a block barrier")
            else:
                number, need = (int(uniform(np.asarray(a(f)), f, "a barrier's operand", e.span)) for a in args)
                f.block.meet(number, need, _in_warps(f), e.span, f"barrier {number}", e.op == "named_barrier")
        return np.int32(0)

    return run


def _elect(c: Any, e: Call) -> Closure:
    def run(f: LaneFrame) -> Value:
        active = f.active().reshape(-1, WARP)
        return (active & (np.arange(WARP) == active.argmax(1)[:, None])).reshape(-1)

    return run


def _in_groups(c: Any, e: Call) -> Closure:
    return lambda f: np.bool_(holds_in(e, f.role.groups[0]))


SYNC_OPS = ("sync_threads", "named_barrier", "named_barrier_arrive")
ROLE_OPS: dict[str, Callable[[Any, Call], Closure]] = {
    "mbarrier_init": _init, "mbarrier_arrive": _arrive, "mbarrier_expect_tx": _arrive, "mbarrier_arrive_expect_tx": _arrive,
    "cp_async_mbarrier_arrive": _copies_arrive, "mbarrier_wait": _wait, "mbarrier_arrive_remote": _arrive_remote, **CLUSTER_OPS,
    "elect_one": _elect, "in_warp_groups": _in_groups,
    **dict.fromkeys(SYNC_OPS, _sync)}  # fmt: skip


# ---- statements -----------------------------------------------------------------------------------------------------


def make_barriers(b: Any, f: LaneFrame, span: Any) -> list[Phases]:
    """The mbarriers of a shared.barrier buffer, in phase 0.  Raises sim-mbarrier unless each has an arrival count."""
    return barriers_of(f.block, b, span)


def barriers_of(block: TileBlock, b: Any, span: Any) -> list[Phases]:
    """The mbarriers of a buffer in a block, created at the first use.  Without counts (attr `arrive`) the counts are 0 until
    mbarrier_init."""
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


def together(c: Any, s: Any, action: Action, part: str = "") -> Action:
    """One action for all warp roles that reach a statement: the last one to arrive executes it, then all continue."""
    members = c.members
    if len(members) < 2:
        return action
    roles, key = {r: c.roles[r].threads for r in members}, (id(s), members, part)

    def run(f: LaneFrame) -> None:
        if f.any_active():
            n = nth(f.role, key)
            what = ("a statement" if part else f"T.{getattr(s, 'op_name', 'Parallel')}") + " of several warp roles"
            f.block.gather((key, n), f.role, roles, s.span, what, lambda: action(f))

    return run


_COMPOUND = (Seq, If, For, While, Launch)
_GATHER = ("in_warp_groups", "sync_threads", *BLOCK_VOTES)


def meets_around(c: Any, s: Stmt) -> bool:
    """Whether the warp roles that reach s synchronise before and after it.

    They do where s accesses memory that they share and contains nothing at which they synchronise anyway.  Enclosing statements
    are the same for all threads, and each warp role runs them by itself.
    """
    if len(c.members) < 2 or isinstance(s, (Alloc, Parallel)):
        return False
    if isinstance(s, TileOp):  # a per-thread tile op; other tile ops are one action of all warp roles
        return _touches_shared(c, s) and any(isinstance(n, Region) and n.buffer.scope_name in PRIVATE for n in walk(s))
    if not _touches_shared(c, s) or not isinstance(s, _COMPOUND):
        return _touches_shared(c, s)
    if any(isinstance(n, Call) and n.op in _GATHER for n in walk(s)):
        return False
    # In divergent code tile ops are per-thread; a warp role may have no thread that reaches them.
    return c.part.at(s) or not any(isinstance(n, (TileOp, Parallel)) for n in walk(s)) and not _exchanges(c, s)


def _exchanges(c: Any, s: Stmt) -> bool:
    """Whether warp roles must synchronise inside a statement that all threads reach.

    True where two statements of a sequence access the same memory and one of them stores, and for a uniform loop that stores
    at all: an iteration may access what the one before stored.
    """
    if c.part.at(s):
        return False
    if isinstance(s, If):
        return _exchanges(c, s.then) or s.orelse is not None and _exchanges(c, s.orelse)
    if isinstance(s, (For, While)):
        return bool(_stored(c, s.body))
    seen: set[Any] = set()
    stored: set[Any] = set()
    for x in s.stmts if isinstance(s, Seq) else ():
        touched, stores = {n.buffer.data for n in _places(c, x)}, _stored(c, x)
        if touched & stored or stores & seen or _exchanges(c, x):
            return True
        seen |= touched
        stored |= stores
    return False


def _places(c: Any, x: Any) -> list[Any]:
    """Accesses to shared memory, or to a tensor that the launch stores to: block barriers order both."""
    kinds = (Load, Store, AddressOf, Region)
    return [n for n in walk(x) if isinstance(n, kinds) and (
        n.buffer.scope() in SHARED or n.buffer.data in c.part.written)]


def _stored(c: Any, x: Any) -> set[Any]:
    """Memory that x may store to."""
    return {n.buffer.data for n in _places(c, x) if not isinstance(n, Load)}


def _touches_shared(c: Any, x: Any) -> bool:
    return bool(_places(c, x))


def asks_shared(c: Any, s: Stmt) -> bool:
    """Whether the condition or extent of a statement depends on memory that warp roles share."""
    asked = (s.cond,) if isinstance(s, (If, While)) else (s.start, s.extent) if isinstance(s, For) else ()
    return len(c.members) > 1 and any(_touches_shared(c, e) for e in asked)


def in_front(c: Any, s: Stmt, action: Action) -> Action:
    """An action of each warp role, after all warp roles that reach it have synchronised."""
    before = together(c, s, lambda f: None, "before")

    def run(f: LaneFrame) -> None:
        before(f)
        action(f)

    return run


def around(c: Any, s: Stmt, action: Action) -> Action:
    """An action of each warp role, with synchronisation before and after it.  The warp roles execute it one after another;
    raises sim-unsupported where that order affects the result (watch.py)."""
    before, behind = (together(c, s, lambda f: None, part) for part in ("before", "behind"))
    key = ("watch", id(s))

    def run(f: LaneFrame) -> None:
        before(f)
        if f.any_active():
            f.role.watch = f.block.once(key, f.role, Watch)
        action(f)
        f.role.watch = None
        behind(f)

    return run


def signalling(c: Any, s: Any, action: Action) -> Action:
    """A TMA Copy: signals its bytes on its barrier (`barrier` = (buffer, index)); with `expect` it announces them first.

    A copy that several blocks of a cluster do together (`share`) fills only the tile of its own block, and signals a part of
    its bytes in each of the blocks.
    """
    if s.plan.barrier is None:
        return action
    buffer, index = s.plan.barrier
    bar, expects = TileBarrier(c, buffer, index, s.span), s.plan.expect
    cta = c.expr(s.plan.dst_block) if s.plan.dst_block is not None else None
    share = s.plan.share
    part, mask = (None, None) if share is None else (c.expr(convert(share[0])), c.expr(convert(share[2])))
    item, extents = s.dst.dtype.bits, [c.expr(e) if isinstance(e, Expr) else e for e in s.dst.extents]

    def run(f: LaneFrame) -> None:
        action(f)
        if f.any_active():
            n = math.prod(e if isinstance(e, int) else int(uniform(np.asarray(e(f)), f, "an extent", s.span))
                          for e in extents)
            if part is not None and mask is not None:
                first = int(uniform(np.asarray(part(f)), f, "a part", s.span)) == 0
                each = n * item // 8 // share[1]
                mine = n * item // 8 - each * (share[1] - 1) if first else each
                to = int(uniform(np.asarray(mask(f)), f, "a mask of blocks", s.span))
                for other in range(to.bit_length()):
                    if to >> other & 1:
                        b = bar.get(f, other)
                        b.tx -= mine
                        b.settle()
                return
            rank = None if cta is None else int(uniform(np.asarray(cta(f)), f, "the rank of a block", s.span))
            b = bar.get(f, rank)
            b.tx += (n * item // 8) * (1 if expects else 0) - n * item // 8
            b.settle()

    return run


def run_warp_roles(blocks: list[LaneFrame], roles: list[WarpRole], body: Action) -> None:
    """Run one block, or the blocks of a cluster, with each warp role as a coroutine."""
    frames = []
    for g in blocks:
        for role in roles:
            f = LaneFrame(list(g.slots), g.lanes, g.mask, g.block)
            if g.lanes > 1:
                f.mask = role.mask(g.lanes) & g.active()
            f.role = WarpRole(role.number, role.groups, role.threads)
            frames.append(f)
    TileScheduler([g.block for g in blocks], frames, body).run()


__all__ = ["NO_EFFECT", "ROLE_OPS", "WarpRole", "SYNC_OPS", "Parting", "TileBarrier", "TileBlock", "around", "asks_shared",
           "in_front", "make_barriers", "meets_around", "warp_roles_of", "run_warp_roles", "signalling", "together",
           "whole_warp_role"]
