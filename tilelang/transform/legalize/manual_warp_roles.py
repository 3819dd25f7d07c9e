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

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Alloc, Buffer, Call, Const, Evaluate, Expr, For, If, Launch, Load,
                         Node, Parallel, Seq, Stmt, TileOp, Var, While, children, const, inner, is_const, replace,
                         rewrite_stmts, seq, stmts_of, walk, with_inner, with_options, BARRIER, FRAGMENT, GLOBAL,
                         LOCAL)
from tilelang.ir.record import state
from tilelang.ops import Copy, Fill, Gemm
from tilelang.ops.tma_copy import check_tma_copy
from tilelang.target.cluster import cluster_of
from tilelang.target.tensor_map import tensor_maps_of
from tilelang.target.thread_calls import linear_thread
from tilelang.target.warp_groups import WARP_LANES, in_some_warps, named, runs, names_warps, warps_in, warps_of, ways_of_warps

from ..analysis.effects import effects
from ..analysis.divergence import WarpSets
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.statements import do, initialised

register("role-fragment", ValueError, "a fragment used by more than one warp role",
         "allocate a fragment for each warp role: a fragment lives in the registers of the threads that use it",
         expected="a separate fragment for each warp role")
register("role-place", ValueError, "warps that do not follow each other, or parts of warps, hold tile operations",
         "let warps that follow each other do it: `if tx >= 32 and tx < 96:`, T.ws(0, 1)",
         expected="whole warps that follow each other")

_OWN = ("in_warp_groups", "wgmma", "wgmma_wait", "bulk_wait", "bulk_commit", "mbarrier_init", "tma_load",
        "cp_async_mbarrier_arrive")
SLOTS = 8  # wgmma groups that are tracked separately; older ones are merged


@pass_(needs=TILE, of=Launch)
def lower_manual_warp_roles(launch: Launch, cx: PassContext) -> Launch:
    """Initialise mbarriers, check warp roles, and pin the accumulators of launches that name Hopper's operations.

    Other launches stay unchanged.

    Raises tma-copy, role-fragment, role-place at the user's line.
    """
    nodes = list(walk(launch.body, Alloc, Call, Copy, Gemm))
    for n in nodes:
        if isinstance(n, Copy) and (n.plan.by_hand or n.plan.dst_block is not None):
            check_tma_copy(n)
            _check_source(launch, n)
    if names_warps(launch.body):
        launch = _given_to_warp_roles(launch)
        _check_warp_roles(launch)
    if any(isinstance(n, Gemm) and n.plan.wait == -1 for n in nodes):
        launch = replace(launch, body=pinned(launch.body))
    _check_raw_loads(launch)
    launch = _pinned_raw_wgmmas(launch)
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
    _check_unwritten(launch, b.data, op.span, "T.tma_copy cannot be done by TMA: `{}` is written by the kernel, and", True)


def _check_raw_loads(launch: Launch) -> None:
    """Reject raw TMA loads of tensors that the same kernel stores to. Raises tma-copy."""
    maps = {m.name: m.buffer for m in tensor_maps_of(launch)}
    for data, c in {maps[c.options.map].data: c for c in walk(launch.body, Call) if c.op == "tma_load"}.items():
        _check_unwritten(launch, data, c.span, "T.tma_load of `{}`, which is written by the kernel:")


def _check_unwritten(launch: Launch, data: Var, span: Any, what: str, but_copies: bool = False) -> None:
    """Reject a load by TMA of a tensor that the kernel stores to.  but_copies: otherwise than by T.tma_copy."""
    for e in effects(launch.body):
        if e.writes and e.storage is data and not (but_copies and isinstance(e.node, Copy) and e.node.plan.by_hand):
            raise error("tma-copy", f"{what.format(e.buffer.name)} TMA does not see what threads store",
                        expected="a tensor that the kernel does not write", found=f"`{e.buffer.name}`, which it writes",
                        span=span, notes=((getattr(e.node, "span", None), "written here"),))


# ---- barriers -----------------------------------------------------------------------------------------------------


def _set_up(launch: Launch, made: list[Buffer], remote: bool) -> Launch:
    """The launch with its barriers initialised before all other statements."""
    init = initialised(made, linear_thread(launch))
    meet = do("cluster_sync" if cluster_of(launch) is not None else "sync_threads")
    setup: list[Stmt] = [Alloc(b, span=b.span) for b in made]
    setup += [] if init is None else [init]
    setup += [meet] if init is not None or remote else []
    body = stmts_of(rewrite_stmts(launch.body, lambda x: seq() if isinstance(x, Alloc) and x.buffer in made else None))
    last = body[-1] if body else None
    over = remote and not (isinstance(last, Evaluate) and last.call.op == "cluster_sync")
    return replace(launch, body=seq(*setup, *body, *([do("cluster_sync")] if over else []), span=launch.body.span))


# ---- warp roles -----------------------------------------------------------------------------------------------------


def _given_to_warp_roles(launch: Launch) -> Launch:
    """The launch with fills and copies that all threads reach, of a fragment that one warp role alone computes with, done by
    that warp role: `T.clear(acc)` in front of it, `T.copy(acc, C)` behind it.

    Block barriers stand around those whose memory other statements use too, in other warp roles perhaps.
    """
    users: dict[Var, set[_Warps]] = {}
    moved: dict[int, Var] = {}
    whole = warps_in(launch)
    for s, warps, outer in _by_warps(launch.body, whole):
        own = {b.data for b in walk(s, Buffer) if b.scope_name == FRAGMENT} if isinstance(s, (TileOp, Parallel)) else {
            x.buffer.data for e in children(s) if isinstance(e, Expr) for x in walk(e, Load)}
        if outer is None and len(own) == 1 and isinstance(s, (Fill, Copy)) and not (isinstance(s, Copy) and s.plan.by_hand):
            moved[id(s)] = own.pop()
        for v in own:
            users.setdefault(v, set()).add(warps)

    touched = list(effects(launch.body))
    stored = {e.storage for e in touched if e.writes}

    def visit(s: Stmt) -> Stmt | None:
        some = users.get(moved[id(s)], set()) if id(s) in moved else set()
        warps = next(iter(some)) if len(some) == 1 else None
        if warps is None or warps == whole:
            return None
        own = {e.storage for e in effects(s)}
        meet = [do("sync_threads")] if any(e.storage in own and e.node is not s and e.buffer.scope_name != FRAGMENT and (
            e.writes or e.storage in stored) for e in touched) else []
        return seq(*meet, If(in_some_warps(warps), s, None, span=s.span), *meet, span=s.span)

    return replace(launch, body=rewrite_stmts(launch.body, visit))


def _check_warp_roles(launch: Launch) -> None:
    """Check where warp roles stand and which fragments they use. Raises role-place, role-fragment."""
    whole = warps_in(launch)
    sets, users = WarpSets(launch), dict[Var, tuple[_Warps, Any]]()
    readers: list[tuple[Load, _Warps, Stmt]] = []

    for s, warps, outer in _by_warps(launch.body, whole):
        if not isinstance(s, (TileOp, Parallel)):
            readers.extend((x, warps, s) for e in children(s) if isinstance(e, Expr) for x in walk(e, Load)
                           if x.buffer.scope_name == FRAGMENT)
            continue
        if outer is not None and (warps is None or launch.num_threads % WARP_LANES):
            raise error("role-place", "a tile operation is the work of warps that follow each other, in a block of whole "
                        "warps", found=f"{sets.found(outer.cond)} of {launch.num_threads} threads", span=s.span,
                        notes=((outer.span, "these warps"),))
        for b in {x for x in walk(s, Buffer) if x.scope_name == FRAGMENT}:
            first, where = users.setdefault(b.data, (warps, s))
            if first != warps:
                raise _of_two(b, warps, first, whole, s, where)
    for x, warps, s in readers:
        owner, where = users.get(x.buffer.data, (warps, s))
        if owner != warps and (warps is None or owner is None or not {*warps} <= {*owner}):
            raise _of_two(x.buffer, warps, owner, whole, s, where)


_Warps = tuple[int, ...] | None  # None: warps that do not follow each other


def _by_warps(s: Stmt, warps: _Warps, outer: If | None = None) -> Iterator[tuple[Any, _Warps, If | None]]:
    """The statements at and below s but for branches by warp, with the warps that reach each and the innermost such branch."""
    if isinstance(s, If) and names_warps(s.cond):
        known: Any = ways_of_warps(s, warps) if warps and warps_of(s.cond) else None
        for come, part in known or [(None, x) for x in inner(s)]:
            yield from _by_warps(part, come if come and len(runs(come)) == 1 else None, s)
        return
    yield s, warps, outer
    if not isinstance(s, (TileOp, Parallel)):
        for x in inner(s):
            yield from _by_warps(x, warps, outer)


def _of_two(b: Buffer, warps: _Warps, first: _Warps, whole: _Warps, s: Any, where: Any) -> Exception:
    one, two = ("the whole block" if x == whole else "some warps" if x is None else named(x)
                for x in (warps, first))
    return error("role-fragment", f"`{b.name}` is used by {one}, and by {two}", found=f"{one} and {two}", span=s.span,
                 notes=((where.span, "used here"),))


# ---- wgmma in flight -------------------------------------------------------------------------------------------------


# For each wgmma group that is surely in flight, newest first: (registers, whether it writes them).
_Flight = tuple[frozenset[tuple[Var, bool]], ...]


@state
class _Running:
    """The registers that each wgmma group in flight may use: newest group first; the last entry merges all older groups.

    sure: of the groups that surely are in flight.
    """

    slots: list[frozenset[Buffer]] = field(default_factory=lambda: [frozenset()] * (SLOTS + 1))
    sure: _Flight = ()

    def issue(self, used: frozenset[Buffer], group: frozenset[tuple[Var, bool]]) -> _Running:
        return _Running([used, *self.slots[:SLOTS - 1], self.slots[SLOTS - 1] | self.slots[SLOTS]], (group, *self.sure))

    def wait(self, n: int) -> tuple[_Running, frozenset[Buffer]]:
        """(what may still be in flight, what was possibly in flight and has certainly ended)."""
        if n > SLOTS:
            return _Running(self.slots, self.sure[:n]), frozenset()
        left = _Running([*self.slots[:n], *[frozenset()] * (SLOTS + 1 - n)], self.sure[:n])
        return left, self.all() - left.all()

    def all(self) -> frozenset[Buffer]:
        return frozenset().union(*self.slots)

    def joined(self, other: _Running) -> _Running:
        return _Running([a | b for a, b in zip(self.slots, other.slots)])


class _Pins:
    """Puts pins after waits, for the accumulators whose wgmmas end there, and before loops that keep wgmmas in flight from one
    iteration to the next; and a wait in front of statements that use registers of a wgmma of a T.wgmma_gemm in the same
    sequence of statements:

        wgmma_gemm(A, B, s)                wgmma_gemm(A, B, s)
        for i, j in Parallel(64, 64):  ->  wgmma_wait(0); wgmma_pin(s)
            o[i, j] += s[i, j]             for i, j in Parallel(64, 64): o[i, j] += s[i, j]

    Only where no path has waited: what loops and branches leave in flight is the program's to wait for (verify_sync)."""

    def __init__(self, body: Stmt) -> None:
        self.root = body
        self.waits: dict[int, int] = {}  # statements with a wait in front of them
        self.ended: dict[int, frozenset[Buffer]] = {}  # what ends at those waits
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
        if not isinstance(s, Seq) and (met := _met(s, state.sure)) is not None:
            self.waits[id(s)] = met
            state, ended = state.wait(met)
            self.note(self.ended, s, ended)
        if isinstance(s, Gemm):
            return self.gemm(s, state)
        if isinstance(s, Evaluate):
            if s.call.op == "wgmma_wait":
                state, ended = state.wait(s.call.options.n)
                self.note(self.after, s, ended)
            elif s.call.op == "wgmma_commit":
                state = state.issue(frozenset(), frozenset())
            return state
        if isinstance(s, If) and (warp_role := warps_of(s.cond)) is not None:
            for x, role in zip(inner(s), (warp_role, (-1, *warp_role))):
                self.branch(role, x, state.sure)
            return _Running(state.slots)
        if isinstance(s, If):
            then = self.flow(s.then, state)
            return then.joined(state if s.orelse is None else self.flow(s.orelse, state))
        if isinstance(s, (For, While)):
            entry = state = _Running(state.slots)
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

    def branch(self, warp_role: tuple[int, ...], s: Stmt, sure: _Flight) -> None:
        """Follow code of one warp role; its wgmmas in flight are separate from those of other warp roles."""
        self.running[warp_role] = self.flow(s, _Running(self.running.get(warp_role, _Running()).slots, sure))

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
                if s.c.buffer not in entry.all() and all(x.buffer is not s.c.buffer for x in walk(loop, Alloc)):
                    self.note(self.before, loop, frozenset((s.c.buffer,)))
                    break
        return state.issue(used, frozenset((r.buffer.data, r is s.c) for r in (s.a, s.c) if r.buffer in used))

    def note(self, table: dict[int, frozenset[Buffer]], s: Stmt, buffers: frozenset[Buffer]) -> None:
        if buffers:
            table[id(s)] = table.get(id(s), frozenset()) | buffers

    def rewritten(self, s: Stmt) -> Stmt:
        new: Any = s
        if isinstance(s, Gemm):
            new = with_options(s, in_flight=True) if id(s) in self.flying else s
            new = with_options(new, behind=True) if id(s) in self.behind else new
        else:
            new = with_inner(s, self.rewritten)
        before, after = self.before.get(id(s)), self.after.get(id(s))
        wait = [do("wgmma_wait", n=self.waits[id(s)]), *_pins(self.ended.get(id(s)))] if id(s) in self.waits else []
        return seq(*wait, *_pins(before), new, *_pins(after), span=s.span) if wait or before or after else new


def pinned(body: Stmt) -> Stmt:
    """The body with the pins and waits of GEMMs that do not wait."""
    return _Pins(body).body()


def _met(s: Stmt, flight: _Flight) -> int | None:
    """How many of the newest groups may stay in flight when s begins; None where s uses registers of none."""
    if not flight:
        return None
    uses: set[tuple[Var, bool]]  # (registers, whether a wgmma in flight that writes them is in the way)
    if isinstance(s, Gemm):  # the hardware orders wgmmas into one accumulator
        uses = {(s.a.buffer.data, True), *(((s.c.buffer.data, False),) if s.plan.wait == -1 else ())}
    else:
        whole = isinstance(s, (TileOp, Parallel)) or not isinstance(s, (If, For, While))
        parts: list[Node] = [s] if whole else [e for e in children(s) if isinstance(e, Expr)]
        used = {b.data for p in parts for b in walk(p, Buffer) if b.scope_name == FRAGMENT}
        if isinstance(s, Evaluate) and s.call.op in ("wgmma_pin", "wgmma_hold"):
            used = set()
        uses = {(v, writes) for v in used for writes in (True, False)}
    return next((n for n, group in enumerate(flight) if group & uses), None)


def _pins(buffers: frozenset[Buffer] | None) -> list[Stmt]:
    return [do("wgmma_pin", AddressOf(b, tuple(const(0) for _ in b.shape)), count=0)
            for b in sorted(buffers or (), key=lambda b: b.name)]


# ---- raw wgmma --------------------------------------------------------------------------------------------------------------
#
#     warpgroup_arrive()                       wgmma_pin(C); wgmma_fence()
#     ptx_wgmma_ss(..., C.data, 0, ...)  ->    wgmma(C, ...)
#     ptx_wgmma_ss(..., C.data, 0, ...)        wgmma_fence(); wgmma(C, ...)
#     warpgroup_wait(0)                        wgmma_wait(0); wgmma_pin(C)
#
# The accumulators change while the program goes on: without the pins a compiler may read them before the wait.
#
# ptxas drops a wgmma whose accumulators and operands equal those of an earlier one, adjacent or not, although the accumulators
# have changed in between. A fence between the two keeps both, at the cost of one WARPGROUP.ARRIVE and no wait. T.gemm does not
# need this: each has its own fence and commit, and its instructions differ in their offsets.


def _pinned_raw_wgmmas(launch: Launch) -> Launch:
    """Each raw wgmma under a fence, and its registers pinned before fences and after waits, where they are in scope."""
    made = [c for c in walk(launch.body, Call) if c.op == "wgmma"]
    raw = {a.buffer for c in made for a in c.args[:2] if isinstance(a, AddressOf) and a.buffer.scope_name == LOCAL}

    def inside(x: Any, seen: tuple[Buffer, ...], fenced: bool = False) -> Any:
        if isinstance(x, Seq):
            out: list[Stmt] = []
            for s in x.stmts:
                if isinstance(s, Alloc) and s.buffer in raw:
                    seen = (*seen, s.buffer)
                out.append(inside(s, seen, fenced))
                fenced = isinstance(s, Evaluate) and s.call.op == "wgmma_fence"
            return seq(*out, span=x.span)
        if isinstance(x, Evaluate) and x.call.op == "wgmma":
            return x if fenced else seq(do("wgmma_fence"), x)
        if isinstance(x, Evaluate) and x.call.op in ("wgmma_fence", "wgmma_wait"):
            pins = [do("wgmma_pin", AddressOf(b, (const(0),)), count=int(b.shape[0])) for b in seen]
            return seq(*pins, x) if x.call.op == "wgmma_fence" else seq(x, *pins)
        return with_inner(x, lambda y: inside(y, seen))

    return inside(launch, ()) if made else launch  # type: ignore[no-any-return]
