"""Roles in tile programs: warp groups that run different code, and the mbarriers between them.

Warp groups that no `in_warp_groups` condition tells apart form one role.  Each role runs the body on its own and waits
at barriers; a tile operation or barrier outside such conditions is one action of all roles that come to it, a shared or
fragment buffer declared there is one buffer.  Copies through TMA (Copy with attrs tma, barrier) are complete at once
and signal their bytes.  Without roles a wait that is not satisfied is a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Expr, Launch, convert, walk
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.warp_groups import holds_in

from .coroutines import Part
from .faults import fault
from .grid import GridScheduler
from .lane_ops import WARP
from .lanes import Action, LaneFrame, uniform
from .mbarrier import Phases
from .tile_cluster import CLUSTER_OPS, cluster_of_frame

GROUP = 128
# Device operations that only order or allot: nothing to do where everything is synchronous.
NO_EFFECT = frozenset({
    "fence_mbarrier_init", "fence_proxy_async", "fence_proxy_async_global", "wgmma_fence",
    "wgmma_commit", "wgmma_wait", "wgmma_pin", "wgmma_hold", "set_max_nreg", "bulk_commit", "bulk_wait",
    "tma_prefetch"})  # fmt: skip


@dataclass
class Role:
    """Warp groups that run the same code.  counts: how often it has come to a statement that roles share, by id."""

    number: int
    groups: tuple[int, ...]
    threads: int
    counts: dict[Any, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"warp group{'s' if len(self.groups) > 1 else ''} {', '.join(map(str, self.groups))}"

    def mask(self, lanes: int) -> np.ndarray:
        return np.isin(np.arange(lanes) // GROUP, self.groups)


def roles_of(s: Launch) -> list[Role]:
    """The roles of a launch, [] when nothing tells its warp groups apart."""
    tests = {(int(n.attr("first")), int(n.attr("count"))) for n in walk(s.body)
             if isinstance(n, Call) and n.op == "in_warp_groups"}
    if not tests:
        return []
    by_answers: dict[tuple[bool, ...], list[int]] = {}
    for g in range(-(-s.num_threads // GROUP)):
        by_answers.setdefault(tuple(a <= g < a + n for a, n in sorted(tests)), []).append(g)
    return [Role(i, tuple(groups), sum(min(GROUP, s.num_threads - GROUP * g) for g in groups))
            for i, groups in enumerate(by_answers.values())]


@dataclass
class _Meeting:
    """Threads gather: how many have come, whether it is over."""

    need: int
    come: int = 0
    done: bool = False


class _Uncounted:
    """Counters of instructions, which tile programs do not keep."""

    def count(self, *_: Any) -> None:
        """Nothing is counted."""


class TileBlock:
    """State of one block of a tile program: its roles, what they share, its mbarriers."""

    counters = _Uncounted()

    def __init__(self, printer: Any, where: str) -> None:
        self.print, self.where = printer.print, where
        self.scheduler: TileScheduler | None = None
        self.shared: dict[tuple[Any, int], Any] = {}
        self.meetings: dict[Any, _Meeting] = {}
        self.barriers: list[Phases] = []
        self.named: dict[int, list[Phases]] = {}  # mbarriers by id of their buffer
        self.cluster: Any = None  # tile_cluster.TileCluster
        self.rank = 0
        self.stores: dict[int, Any] = {}  # shared memory by id of the buffer's data, and how to make it for another block
        self.makers: dict[int, Callable[[LaneFrame], Any]] = {}

    def wait(self, until: Callable[[], bool], why: Callable[[], str], span: Any) -> None:
        """Go on once `until()` holds.  Raises sim-barrier when nobody can bring that about."""
        if until():
            return
        if self.scheduler is None:
            raise fault("sim-barrier", f"the block waits for ever {why()}, in block {self.where}",
                        found="a block that waits for ever", span=span,
                        hint="nothing else runs in this block that could complete the barrier")
        self.scheduler.wait(until, why, span)

    def once(self, key: Any, role: Role, make: Callable[[], Any]) -> Any:
        """What the first role to come here makes; the others get the same."""
        at = (key, _nth(role, key))
        if at not in self.shared:
            self.shared[at] = make()
        return self.shared[at]

    def meet(self, key: Any, need: int, n: int, span: Any, why: str, waits: bool = True,
             action: Callable[[], None] | None = None) -> None:
        """n of `need` threads come; the last acts, then all go on."""
        m = self.meetings.setdefault(key, _Meeting(need))
        if m.need != need:
            raise fault("sim-barrier", f"{why} is used with {need} threads and with {m.need} at once",
                        expected="one number of threads", found=f"{need} and {m.need}", span=span)
        m.come += n
        if m.come >= m.need:
            del self.meetings[key]
            if action is not None:
                action()
            m.done = True
        if waits:
            self.wait(lambda: m.done, lambda: f"at {why} ({m.come} of {m.need} threads are there)", span)


def _nth(role: Role, key: Any) -> int:
    role.counts[key] = role.counts.get(key, 0) + 1
    return role.counts[key]


class TileScheduler(GridScheduler):
    """Runs the roles of a block."""

    def __init__(self, blocks: list[TileBlock], frames: list[LaneFrame], body: Action) -> None:
        of = [f" of block {f.block.where}" if len(blocks) > 1 else "" for f in frames]
        super().__init__([Part(f.role.number, f.role.name + o, f, body) for f, o in zip(frames, of)])
        self.block, self.blocks = blocks[0], blocks
        for b in blocks:
            b.scheduler = self

    def deadlock(self, left: list[Part]) -> Exception:
        states = [b.state() for block in self.blocks for b in block.barriers if b.pending != b.count or b.tx]
        told = [(p.place, f"{p.name} waits {p.why()}") for p in left]
        return fault("sim-barrier", f"all roles left wait for ever in block {self.block.where}: "
                     + "; ".join(t for _, t in told) + (f" ({'; '.join(states)})" if states else ""),
                     expected="arrivals that let every role go on", found="roles that wait for ever",
                     span=told[0][0], notes=tuple(told[1:]), label=told[0][1],
                     hint="check parities and counts of the barriers: each role must pass them equally often")


def executing(f: LaneFrame) -> int:
    """Threads that execute a statement: all of the role where threads are not told apart."""
    if f.lanes == 1:
        return f.role.threads
    return int(f.active().sum())


# ---- calls ----------------------------------------------------------------------------------------------------------


class _Barrier:
    """An operand that names one mbarrier: AddressOf(buffer, (index,)), or (buffer, index) of a Copy's attrs."""

    def __init__(self, c: Any, buffer: Any, index: Any, span: Any) -> None:
        self.slot, self.buffer, self.span = c.slot(buffer.data), buffer, span
        self.index = c.expr(index) if isinstance(index, Expr) else (lambda f: np.asarray(index))

    @staticmethod
    def of(c: Any, a: Any, span: Any) -> _Barrier:
        if not isinstance(a, AddressOf) or a.buffer.scope() != "shared.barrier":
            raise fault("sim-unsupported", "an mbarrier is given as the address of a shared.barrier element",
                        expected="the address of a shared.barrier element", found="another operand", span=span)
        return _Barrier(c, a.buffer, a.indices[0], span)

    def get(self, f: LaneFrame, rank: int | None = None, fresh: bool = False) -> Phases:
        """rank: that of another block of the cluster.  fresh: it may have no count yet, else that raises sim-mbarrier."""
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
    """mbarrier_init: of barriers whose buffer has no counts (attr `arrive`), which the program sets up itself."""
    bar, count = _Barrier.of(c, e.args[0], e.span), c.expr(e.args[1])
    if dict(bar.buffer.attrs).get("arrive") is not None:
        return lambda f: np.int32(0)

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            b = bar.get(f, fresh=True)
            b.count = b.pending = int(uniform(np.asarray(count(f)), f, "the count of an mbarrier", e.span))
            b.phase = b.tx = 0
        return np.int32(0)

    return run


def _arrive(c: Any, e: Call) -> Closure:
    """mbarrier_arrive, mbarrier_expect_tx, mbarrier_arrive_expect_tx, by every thread that executes it."""
    bar = _Barrier.of(c, e.args[0], e.span)
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
    """cp_async_mbarrier_arrive: copies have landed already, so threads that it counts arrive, and others add nothing."""
    bar, counted = _Barrier.of(c, e.args[0], e.span), bool(e.attr("noinc"))

    def run(f: LaneFrame) -> Value:
        if counted and f.any_active():
            bar.get(f).arrive(executing(f), e.span)
        return np.int32(0)

    return run


def _arrive_remote(c: Any, e: Call) -> Closure:
    """mbarrier_arrive_remote(bar, cta)."""
    bar, cta = _Barrier.of(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            ranks = np.asarray(cta(f))
            if ranks.ndim == 0:
                bar.get(f, int(ranks)).arrive(executing(f), e.span)
            else:  # the lanes of a warp may each tell another block
                for rank, n in zip(*np.unique(ranks[f.active()], return_counts=True)):
                    bar.get(f, int(rank)).arrive(int(n), e.span)
        return np.int32(0)

    return run


def _wait(c: Any, e: Call) -> Closure:
    bar, parity = _Barrier.of(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            b, p = bar.get(f), int(uniform(np.asarray(parity(f)), f, "a parity", e.span))
            f.block.wait(lambda: b.passed(p), lambda: f"for parity {p} of {b.state()}", e.span)
        return np.int32(0)

    return run


def _sync(c: Any, e: Call) -> Closure:
    """sync_threads, named_barrier, named_barrier_arrive: real between roles, nothing to do without them."""
    members = c.members
    if not c.roles:
        return lambda f: np.int32(0)
    args = [c.expr(a) for a in e.args]
    whole = sum(c.roles[r].threads for r in members)

    def run(f: LaneFrame) -> Value:
        if f.any_active():
            if e.op == "sync_threads":
                f.block.meet(("sync", members), whole, executing(f), e.span, "a block barrier")
            else:
                number, need = (int(uniform(np.asarray(a(f)), f, "a barrier's operand", e.span)) for a in args)
                f.block.meet(number, need, executing(f), e.span, f"barrier {number}", e.op == "named_barrier")
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
    """The mbarriers of a shared.barrier buffer, in phase 0.  Raises sim-mbarrier for arrival counts that are not one each."""
    return barriers_of(f.block, b, span)


def barriers_of(block: TileBlock, b: Any, span: Any) -> list[Phases]:
    """The mbarriers of a buffer in a block, made when somebody first comes to them; without counts (attr `arrive`) those are
    0 until mbarrier_init."""
    got = block.named.get(id(b))
    if got is not None:
        return got
    counts = dict(b.attrs).get("arrive") or (0,) * math.prod(b.shape)
    if len(counts) != math.prod(b.shape):
        raise fault("sim-mbarrier", f"{b.name} has no arrival count for each of its barriers",
                    expected="an arrival count for each barrier", found=str(len(counts)), span=span,
                    hint="a shared.barrier buffer has the attribute arrive, one count a barrier")
    of = f" of block {block.where}" if block.cluster is not None else ""
    made = [Phases(f"{b.name}[{i}]{of}", int(n)) for i, n in enumerate(counts)]
    block.barriers += made
    block.named[id(b)] = made
    return made


def together(c: Any, s: Any, action: Action) -> Action:
    """An action of all roles that come to a statement: the last of them does it, then all go on."""
    members = c.members
    if len(members) < 2:
        return action
    need, key = sum(c.roles[r].threads for r in members), (id(s), members)

    def run(f: LaneFrame) -> None:
        if f.any_active():
            n = _nth(f.role, key)
            what = f"T.{getattr(s, 'op_name', 'Parallel')} of several roles"
            f.block.meet((key, n), need, f.role.threads, s.span, what, action=lambda: action(f))

    return run


def signalling(c: Any, s: Any, action: Action) -> Action:
    """A Copy through TMA: signals its bytes on its barrier (attr `barrier` = (buffer, index)); with attr `expect` it
    announces them first.  One that blocks of a cluster share (attr `share`) fills the own tile alone and signals a part of
    its bytes in each of them."""
    if s.attr("barrier") is None:
        return action
    buffer, index = s.attr("barrier")
    bar, expects = _Barrier(c, buffer, index, s.span), bool(s.attr("expect"))
    cta = c.expr(s.attr("dst_block")) if s.attr("dst_block") is not None else None
    share = s.attr("share")
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


def run_roles(blocks: list[LaneFrame], roles: list[Role], body: Action) -> None:
    """Run one block, or the blocks of a cluster: each role on its own."""
    frames = []
    for g in blocks:
        for role in roles:
            f = LaneFrame(list(g.slots), g.lanes, g.mask, g.block)
            if g.lanes > 1:
                f.mask = role.mask(g.lanes) & g.active()
            f.role = Role(role.number, role.groups, role.threads)
            frames.append(f)
    TileScheduler([g.block for g in blocks], frames, body).run()


__all__ = ["NO_EFFECT", "ROLE_OPS", "Role", "SYNC_OPS", "TileBlock", "make_barriers", "roles_of", "run_roles",
           "signalling", "together"]
