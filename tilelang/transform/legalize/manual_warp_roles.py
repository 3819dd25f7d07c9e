"""Lower hand-written Hopper programs: set up mbarriers, check warp roles, pin accumulators where their wgmmas end.

    full = alloc_barrier([128, 128])                 full; if thread 0: mbarrier_init(full[i], 128) ...; fence
    with T.ws(1): ...                                sync_threads
    with T.ws(0):                              ->    if in_warp_groups(1): ...
        for k in ...:                                if in_warp_groups(0):
            wgmma_gemm(A, B, C)                          for k in ...:
            wait_wgmma(0)                                    wgmma_gemm(A, B, C); wgmma_wait(0); wgmma_pin(C)

In a launch with clusters the barriers are set up before any block of the cluster goes on, and no block ends before the
last access of the others to its shared memory.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Alloc, Buffer, Call, Const, Evaluate, Expr, For, Func, If, Launch, Parallel, Stmt, TileOp,
                         Var, While, binary, const, inner, is_const, rebuild, replace, rewrite_launches, seq, stmts_of, walk,
                         with_options, GLOBAL, FRAGMENT, BARRIER)
from tilelang.ir.record import state
from tilelang.ops import Copy, Gemm
from tilelang.ops.tma_copy import check_tma_copy
from tilelang.target.cluster import cluster_of

from ..check.check_hopper import linear_thread
from ..analysis.effects import effects
from ..framework.pass_ import TILE, PassContext, pass_
from .raw_hopper import check_raw_loads, pin_raw_wgmmas
from .repeated_wgmma import fence_repeated_wgmmas
from ..analysis.statements import do

register("role-fragment", ValueError, "a fragment used by more than one warp role",
         "allocate a fragment for each warp role: a fragment lives in the registers of the threads that use it",
         expected="a fragment of its own for each warp role")
register("role-place", ValueError, "warp roles inside each other, or for scattered warp groups, hold tile operations",
         "name warp groups that follow each other, outside of other T.ws blocks",
         expected="warp groups that follow each other, outside of other T.ws blocks")

GROUP = 128
_OWN = ("in_warp_groups", "wgmma", "wgmma_wait", "bulk_wait", "bulk_commit", "mbarrier_init", "tma_load",
        "cp_async_mbarrier_arrive")
SLOTS = 8  # wgmma groups that are tracked separately; older ones are merged


@pass_(needs=TILE)
def lower_manual_warp_roles(func: Func, cx: PassContext) -> Func:
    """Initialise mbarriers, check warp roles, and pin the accumulators of launches that name Hopper's operations.

    Other launches stay unchanged.

    Raises tma-copy, role-fragment, role-place at the user's line.
    """
    return rewrite_launches(func, _written)


def _written(launch: Launch) -> Launch:
    nodes = list(walk(launch.body, Alloc, Call, Copy, Gemm))
    for n in nodes:
        if isinstance(n, Copy) and (n.plan.by_hand or n.plan.dst_block is not None):
            check_tma_copy(n)
            _check_source(launch, n)
    if any(isinstance(n, Call) and n.op == "in_warp_groups" for n in nodes):
        _check_warp_roles(launch)
    if any(isinstance(n, Gemm) and n.plan.wait == -1 for n in nodes):
        launch = replace(launch, body=_Pins(launch.body).body())
    check_raw_loads(launch)
    launch = fence_repeated_wgmmas(pin_raw_wgmmas(launch))
    made = [n.buffer for n in nodes if isinstance(n, Alloc) and n.buffer.scope_name == BARRIER]
    remote = any(isinstance(n, Call) and n.op in ("mbarrier_arrive_remote", "cluster_store", "cluster_load") or
                 isinstance(n, Copy) and (n.plan.dst_block is not None or n.plan.cluster_mask) for n in nodes)
    if made or remote:
        launch = _set_up(launch, made, remote and cluster_of(launch) is not None)
    by_hand = made or remote or any(isinstance(n, Call) and n.op in _OWN for n in nodes)
    numbers = {int(n.args[0].value) if isinstance(n.args[0], Const) else -1 for n in nodes
               if isinstance(n, Call) and n.op in ("named_barrier", "named_barrier_arrive")}
    return with_options(launch, by_hand=True, barrier_numbers=tuple(sorted(numbers)) or None) if by_hand else launch


def _check_source(launch: Launch, op: Copy) -> None:
    """Check a load by TMA: it fills with zeros, and does not see ordinary stores of the same kernel. Raises tma-copy."""
    b = op.src.buffer
    if b.scope_name != GLOBAL:
        return
    safe = dict(launch.plan.safe_values).get(b)
    if safe is not None and not is_const(safe, 0):
        raise error("tma-copy", f"T.tma_copy cannot be done by TMA: outside `{b.name}` reads as {safe}",
                    expected="0 outside the tensor", found=str(safe), span=op.span)
    for e in effects(launch.body):
        if e.writes and e.storage is b.data and not (isinstance(e.node, Copy) and e.node.plan.by_hand):
            raise error("tma-copy", f"T.tma_copy cannot be done by TMA: `{b.name}` is written by the kernel, and TMA does not "
                        "see what threads store",
                        expected="a tensor that the kernel does not write", found=f"`{b.name}`, which it writes",
                        span=op.span, notes=((getattr(e.node, "span", None), "written here"),))


# ---- barriers -----------------------------------------------------------------------------------------------------


def _set_up(launch: Launch, made: list[Buffer], remote: bool) -> Launch:
    """The launch with its barriers initialised before all other statements."""

    def without(x: Any) -> Any:
        if isinstance(x, Alloc) and x.buffer in made:
            return seq()
        if isinstance(x, tuple):
            return tuple(map(without, x))
        return rebuild(x, without) if isinstance(x, Stmt) and not isinstance(x, TileOp) else x

    thread = linear_thread(launch)
    inits = [do("mbarrier_init", AddressOf(b, (const(k),)), const(n, "uint32"))
             for b in made for k, n in enumerate(b.facts.arrive or ())]
    meet = do("cluster_sync" if cluster_of(launch) is not None else "sync_threads")
    setup: list[Stmt] = [Alloc(b, span=b.span) for b in made]
    if inits:
        setup.append(If(binary("eq", thread, const(0, thread.dtype)), seq(*inits, do("fence_mbarrier_init"))))
    if inits or remote:
        setup.append(meet)
    body = stmts_of(without(launch.body))
    last = body[-1] if body else None
    over = remote and not (isinstance(last, Evaluate) and last.call.op == "cluster_sync")
    return replace(launch, body=seq(*setup, *body, *([do("cluster_sync")] if over else []), span=launch.body.span))


# ---- warp roles -----------------------------------------------------------------------------------------------------


def warp_role_of(cond: Expr) -> tuple[int, int] | None:
    """(first, count) of the warp groups of a condition that is a single in_warp_groups; None for other conditions."""
    if isinstance(cond, Call) and cond.op == "in_warp_groups":
        return cond.options.first, cond.options.count
    return None


def _check_warp_roles(launch: Launch) -> None:
    """Check where warp roles stand and which fragments they use. Raises role-place, role-fragment."""
    whole = (0, -(-launch.num_threads // GROUP))
    flat = launch.threads[1:] == (1, 1) and launch.num_threads % GROUP == 0
    users: dict[Var, tuple[tuple[int, int], Any]] = {}

    def stmt(s: Stmt, warp_role: tuple[int, int], outer: Stmt | None) -> None:
        if isinstance(s, (TileOp, Parallel)):
            if outer is not None and (warp_role == (-1, 0) or not flat):
                raise error("role-place", "a tile operation is the work of warp groups that follow each other, outside of "
                            "other warp roles, in a block of whole warp groups along x",
                            found="others", span=s.span,
                            notes=((outer.span, "these warp groups"),))
            for b in {x for x in walk(s, Buffer) if x.scope_name == FRAGMENT}:
                first, where = users.setdefault(b.data, (warp_role, s))
                if first != warp_role:
                    raise error("role-fragment", f"`{b.name}` is used by {_groups(warp_role, whole)}, and by "
                                f"{_groups(first, whole)}",
                                found=f"{_groups(warp_role, whole)} and {_groups(first, whole)}",
                                span=s.span, notes=((where.span, "used here"),))
            return
        if isinstance(s, If) and any(x.op == "in_warp_groups" for x in walk(s.cond, Call)):
            got = warp_role_of(s.cond)
            stmt(s.then, got if got is not None and warp_role == whole else (-1, 0), s)
            if s.orelse is not None:
                stmt(s.orelse, _rest(got, whole) if got is not None and warp_role == whole else (-1, 0), s)
            return
        for x in inner(s):
            stmt(x, warp_role, outer)

    stmt(launch.body, whole, None)


def _rest(warp_role: tuple[int, int], whole: tuple[int, int]) -> tuple[int, int]:
    """The warp groups outside a warp role, (-1, 0) when they are not consecutive."""
    (first, count), groups = warp_role, whole[1]
    if first == 0:
        return count, groups - count
    return (0, first) if first + count == groups else (-1, 0)


def _groups(warp_role: tuple[int, int], whole: tuple[int, int]) -> str:
    first, count = warp_role
    if warp_role == whole:
        return "the whole block"
    return f"warp group {first}" if count == 1 else f"warp groups {first} to {first + count - 1}"


# ---- wgmma in flight -------------------------------------------------------------------------------------------------


@state
class _Running:
    """The registers that each wgmma group in flight may use: newest group first; the last entry merges all older groups."""

    slots: list[frozenset[Buffer]] = field(default_factory=lambda: [frozenset()] * (SLOTS + 1))

    def issue(self, used: frozenset[Buffer]) -> _Running:
        return _Running([used, *self.slots[:SLOTS - 1], self.slots[SLOTS - 1] | self.slots[SLOTS]])

    def wait(self, n: int) -> tuple[_Running, frozenset[Buffer]]:
        """(what may still be in flight, what was possibly in flight and has certainly ended)."""
        if n > SLOTS:
            return self, frozenset()
        left = _Running([*self.slots[:n], *[frozenset()] * (SLOTS + 1 - n)])
        return left, self.all() - left.all()

    def all(self) -> frozenset[Buffer]:
        return frozenset().union(*self.slots)

    def joined(self, other: _Running) -> _Running:
        return _Running([a | b for a, b in zip(self.slots, other.slots)])


class _Pins:
    """Puts pins after waits, for the accumulators whose wgmmas end there, and before loops that keep wgmmas in flight from one
    iteration to the next."""

    def __init__(self, body: Stmt) -> None:
        self.root = body
        self.after: dict[int, frozenset[Buffer]] = {}
        self.before: dict[int, frozenset[Buffer]] = {}
        self.flying: set[int] = set()  # GEMMs into accumulators that an earlier GEMM in flight may use
        self.behind: set[int] = set()  # synchronous GEMMs before which others may be in flight
        self.loops: list[tuple[Stmt, _Running]] = []
        self.running: dict[tuple[int, ...], _Running] = {}

    def body(self) -> Stmt:
        self.flow(self.root, _Running())
        return self.rewritten(self.root)

    def flow(self, s: Stmt, state: _Running) -> _Running:
        if isinstance(s, Gemm):
            return self.gemm(s, state)
        if isinstance(s, Evaluate):
            if s.call.op == "wgmma_wait":
                state, ended = state.wait(s.call.options.n)
                self.note(self.after, s, ended)
            elif s.call.op == "wgmma_commit":
                state = state.issue(frozenset())
            return state
        if isinstance(s, If) and (warp_role := warp_role_of(s.cond)) is not None:
            self.branch(warp_role, s.then)
            if s.orelse is not None:
                self.branch((-1, *warp_role), s.orelse)
            return state
        if isinstance(s, If):
            then = self.flow(s.then, state)
            return then.joined(state if s.orelse is None else self.flow(s.orelse, state))
        if isinstance(s, (For, While)):
            entry = state
            for _ in range(SLOTS + 2):
                before = dict(self.running)
                self.loops.append((s, entry))
                new = state.joined(self.flow(s.body, state))
                self.loops.pop()
                for key, then in before.items():
                    self.running[key] = then.joined(self.running[key])
                if new.slots == state.slots and {r: x.slots for r, x in before.items()} == {
                        r: x.slots for r, x in self.running.items()}:
                    break
                state = new
            return state
        for x in inner(s):
            state = self.flow(x, state)
        return state

    def branch(self, warp_role: tuple[int, ...], s: Stmt) -> None:
        """Follow code of one warp role; its wgmmas in flight are separate from those of other warp roles."""
        self.running[warp_role] = self.flow(s, self.running.get(warp_role, _Running()))

    def gemm(self, s: Gemm, state: _Running) -> _Running:
        used = frozenset(r.buffer for r in (s.a, s.c) if r.buffer.scope_name == FRAGMENT)
        if s.plan.wait != -1:
            state, ended = state.wait(0)
            self.note(self.after, s, ended)
            if ended:
                self.behind.add(id(s))
            return state
        if s.c.buffer in state.all():
            self.flying.add(id(s))
            for loop, entry in self.loops:
                if s.c.buffer not in entry.all():
                    self.note(self.before, loop, frozenset((s.c.buffer,)))
                    break
        return state.issue(used)

    def note(self, table: dict[int, frozenset[Buffer]], s: Stmt, buffers: frozenset[Buffer]) -> None:
        if buffers:
            table[id(s)] = table.get(id(s), frozenset()) | buffers

    def rewritten(self, s: Any) -> Any:
        if isinstance(s, tuple):
            return tuple(map(self.rewritten, s))
        if not isinstance(s, Stmt):
            return s
        new = s
        if isinstance(s, Gemm):
            new = with_options(s, in_flight=True) if id(s) in self.flying else s
            new = with_options(new, behind=True) if id(s) in self.behind else new
        elif not isinstance(s, TileOp):
            new = rebuild(s, self.rewritten)
        before, after = self.before.get(id(s)), self.after.get(id(s))
        if not before and not after:
            return new
        return seq(*map(_pin, _ordered(before)), new, *map(_pin, _ordered(after)), span=s.span)


def _ordered(buffers: frozenset[Buffer] | None) -> list[Buffer]:
    return sorted(buffers or (), key=lambda b: b.name)


def _pin(b: Buffer) -> Stmt:
    return do("wgmma_pin", AddressOf(b, tuple(const(0) for _ in b.shape)), count=0)


__all__ = ["warp_role_of", "lower_manual_warp_roles"]
