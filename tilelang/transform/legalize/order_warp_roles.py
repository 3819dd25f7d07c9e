"""Put block barriers between warp roles that touch one element of shared memory and that nothing else orders.

    with T.ws(0):                               with T.ws(0):
        S[tx] = A[tx]                    ->         S[tx] = A[tx]
    with T.ws(1):                               T.sync_threads()
        B[tx - 128] = S[255 - tx]               with T.ws(1): …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tilelang.errors import TileLangError, error
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Expr, For, Func, If, Launch, Load, Parallel, Region, Seq,
                         Stmt, TileOp, Var, While, convert, inner, rewrite_launches, replace, seq, walk, with_inner, BARRIER,
                         CLUSTER_BARRIER, SHARED)
from tilelang.ir.evaluate import evaluate
from tilelang.target.intrinsics import INTRINSICS, PURE, SYNC, WARP
from tilelang.target.warp_groups import WARP_LANES, holds_in, warps_in

from ..analysis.divergence import Divergence
from ..analysis.effects import effects, own_effects
from ..framework.config import PassConfigKey
from ..analysis.statements import BARRIERS, barrier
from ..framework.pass_ import TILE, PassContext, pass_

_MOST = 1 << 18  # most elements of a buffer, and most places of an access, that are looked at
_ITERATIONS = 8  # of a loop around warp roles that are followed
# Calls that order nothing between warps, beside the pure ones.
_OWN = frozenset(("sync_threads", "sync_warp", "cp_async", "cp_async_commit", "cp_async_wait", "printf", "set_max_nreg",
                  "ldmatrix", "stmatrix", "mma", "fence_proxy_async", "assume"))
# Calls that other warps wait for, and that wait for nothing.
_SIGNALS = frozenset(("named_barrier_arrive", "mbarrier_init", "mbarrier_arrive", "mbarrier_expect_tx",
                      "mbarrier_arrive_expect_tx", "mbarrier_arrive_remote", "cp_async_mbarrier_arrive", "fence_mbarrier_init"))
_OF_ALL = BARRIERS - {"sync_threads"}  # sync_threads in a warp role counts only its threads
_Warps = tuple[int, ...]


@pass_(needs=TILE)
def order_warp_roles(func: Func, cx: PassContext) -> Func:
    """Put a barrier of all threads in front of a warp role that touches what another warp role in front of it stores, or stores
    what it touches, also from one iteration of a loop to the next.

    It stands where all threads pass, and where no warp role in front of it waits for another.  Warp roles order themselves
    where they hold a named barrier, mbarrier, atomic, while loop or call of unknown effect.  What is left without an order is
    checked by verify_sync, which knows all addresses.
    Raises "sync-unordered" where no barrier may stand between accesses that certainly meet, and "collective-divergent" for
    votes of the block and barriers of the grid that only some warps reach: on a device the groups that get there would wait
    for the others, or would be counted with groups that vote about something else.
    """
    def ordered(launch: Launch) -> Launch:
        order = _Order(launch)
        if len(order.warps) > 1 and order.among(launch.body):
            order.follow(launch.body)
        return replace(launch, body=order.written(launch.body)) if order.before else launch

    out: Func = func if cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC) else rewrite_launches(func, ordered)
    for n in walk(out, Launch):
        _check_votes(n.body, warps_in(n), None)
    return out


class _Order:
    """Follows the warp roles of a block in program order.

    before: statements (by id) that a barrier precedes.  pending: warp roles since the last barrier of all threads.  legal:
    whether all of the warps come here alike.  env: values of loop variables.  names: bindings seen so far.  stretch: number of
    the present run of branches by warp with nothing else in between; start: of the last one before the innermost loop's
    iteration, whose statements are `body`.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch, self.warps, self.legal = launch, warps_in(launch), True
        self.before: set[int] = set()
        self.env: dict[Var, Any] = {}
        self.names: dict[Var, Expr] = {}
        self.pending: list[_WarpRole] = []
        self.stretch, self.start, self.body = 0, -1, launch.body

    @cached_property
    def divergence(self) -> Divergence:
        return Divergence(self.launch)

    def among(self, s: Stmt) -> bool:
        """Whether there are branches by warp below a statement."""
        return any(_warp_roles(x, self.warps) for x in walk(s, If))

    def written(self, s: Stmt) -> Stmt:
        """A statement with its barriers."""
        out: Stmt = with_inner(s, self.written)
        return seq(barrier(s), out, span=s.span) if id(s) in self.before else out

    def follow(self, s: Stmt) -> None:
        """Follow a statement that all of the warps reach."""
        if id(s) in self.before:
            self.pending = []
        if (parts := _warp_roles(s, self.warps)) is not None:
            self.roles(s, [_WarpRole(self, warps, body, len(parts) == 1) for warps, body in parts])
            return
        self.stretch += not isinstance(s, Seq)
        if isinstance(s, Seq):
            for x in s.stmts:
                self.follow(x)
        elif isinstance(s, Bind):
            self.names[s.var] = s.value
        elif isinstance(s, (For, While)) and self.among(s.body):
            self.loop(s)
        elif isinstance(s, If) and self.among(s):
            start, after, legal = self.pending, list[_WarpRole](), self.legal
            self.legal = legal and not self.divergence.divergent(s.cond)
            for way in (s.then, s.orelse or Seq(())):
                self.pending = list(start)
                self.follow(way)
                after += [x for x in self.pending if all(x is not y for y in after)]
            self.pending, self.legal = after, legal
        elif not isinstance(s, Alloc) and (any(e.buffer.scope_name in SHARED for e in effects(s)) or any(
                _waits(x) or x.op in BARRIERS for x in walk(s, Call))):
            self.pending = []  # place_sync orders these accesses with those of warp roles, or the program orders its threads

    def loop(self, s: For | While) -> None:
        """Follow some iterations of a loop."""
        first, extent = (_number(s.start), _number(s.extent)) if isinstance(s, For) else (None, None)
        kept, bounds = (self.legal, self.start, self.body), (s.start, s.extent) if isinstance(s, For) else (s.cond,)
        self.legal &= not self.divergence.leaves_early(s.body, False) and not any(map(self.divergence.divergent, bounds))
        for k in range(min(2 if first is None else _ITERATIONS, _ITERATIONS if extent is None else extent)):
            self.env.update({s.var: first + k} if isinstance(s, For) and first is not None else {})
            self.start, self.body = self.stretch, s.body
            self.stretch += 1
            self.follow(s.body)
        if isinstance(s, For):
            self.env.pop(s.var, None)
        self.legal, self.start, self.body = kept

    def roles(self, s: Stmt, roles: list[_WarpRole]) -> None:
        """Follow a branch by warp; its ways run at the same time."""
        own = roles[0]
        near = [x for x in self.pending if x.stretch == self.stretch and not set(x.warps).isdisjoint(own.warps)]
        if near and own.alone and near[-1].alone and near[-1].warps == own.warps:
            own.group = near[-1].group
        met = [x for two in roles for one in self.pending for x in _meeting(one, two)]
        if met and self.legal and not any(x.waits for x in self.pending):
            carried = all(one.stretch <= self.start for one, *_ in met)  # from an iteration before: the barrier may stand first
            self.before.add(id(self.body if carried else s))
            self.pending = [x for x in self.pending if carried and x.stretch > self.start]
            met = []
        for x in (*met, *(x for k, two in enumerate(roles) for one in roles[:k] for x in _meeting(one, two))):
            _check(*x)
        self.pending += roles


def _warp_roles(s: Stmt, warps: _Warps) -> list[tuple[_Warps, Stmt]] | None:
    """(warps, body) of the ways of a branch by warp; None for other statements."""
    if not isinstance(s, If) or any(holds_in(s.cond, w) is None for w in warps):
        return None
    ways = [(tuple(w for w in warps if holds_in(s.cond, w) is want), part)
            for want, part in ((True, s.then), (False, s.orelse)) if part is not None]
    return [(come, part) for come, part in ways if come]


@dataclass(eq=False)
class _Access:
    """Elements of a shared buffer, a bool for each; None where they are not known.  writes: whether it stores.  sure: whether
    the warp role surely accesses these."""

    buffer: Buffer
    places: Any
    writes: bool
    sure: bool
    span: Any


class _WarpRole:
    """A warp role: whether it may order itself with others (meets), whether it may wait for them, and its accesses.

    group: place_sync orders the accesses of warp roles of one group, which are code of the same warps with only code of other
    warps in between.
    """

    def __init__(self, order: _Order, warps: _Warps, body: Stmt, alone: bool) -> None:
        self.launch, self.warps, self.body, self.alone = order.launch, warps, body, alone
        self.names, self.around, self.stretch, self.group = dict(order.names), dict(order.env), order.stretch, id(body)
        signals = any(isinstance(n, While) or isinstance(n, TileOp) and _signals(n) for n in walk(body))
        self.waits = signals or any(map(_waits, walk(body, Call)))
        self.meets = signals or any(not _own(n) for n in walk(body, Call))

    @cached_property
    def accesses(self) -> list[_Access]:
        x, y, _ = self.launch.threads
        t = np.concatenate([np.arange(w * WARP_LANES, min((w + 1) * WARP_LANES, self.launch.num_threads)) for w in self.warps])
        env = {**dict(zip(self.launch.thread_vars, (t % x, t // x % y, t // (x * y)))), **self.around}
        for v, e in self.names.items():
            if (known := _value(e, env)) is not None:
                env[v] = known
        return list(_accesses(self.body, env, np.ones(len(t), bool), True))


def _own(c: Call) -> bool:
    """Whether a call orders nothing between warps."""
    row = INTRINSICS.get(c.op)
    return c.op in _OWN or row is not None and row.effect in (PURE, WARP)


def _waits(c: Call) -> bool:
    """Whether a call may wait for other warps."""
    row = INTRINSICS.get(c.op)
    return row is None and c.op not in _OWN or row is not None and row.effect == SYNC and c.op not in (*_OWN, *_SIGNALS)


def _signals(op: TileOp) -> bool:
    """Whether a tile operation names an mbarrier."""
    return getattr(op, "barrier", None) is not None or any(
        n.buffer.scope_name in (BARRIER, CLUSTER_BARRIER) for n in walk(op, Load, AddressOf, Region))


def _accesses(s: Stmt, env: dict[Var, Any], mask: Any, sure: bool) -> Iterator[_Access]:
    """The accesses of shared memory below a statement.  env: values of names, one for each of the points that `mask` has."""
    for e in own_effects(s):
        b = e.buffer
        if b.scope_name in SHARED:
            places, known = _box(e.region, env) if e.region is not None else (_places(b, e.indices, env, mask), True)
            for writes in {e.writes, not e.reads}:
                yield _Access(b, places, writes, sure and known and places is not None, getattr(s, "span", None))
    match s:
        case Seq():
            for x in s.stmts:
                yield from _accesses(x, env, mask, sure)
        case Bind():
            if (v := _value(s.value, env)) is not None:
                env[s.var] = v
        case If():
            holds = _value(s.cond, env)
            for part, way in ((s.then, True), (s.orelse, False)):
                taken = mask if holds is None else mask & (np.asarray(holds, bool) == way)
                if part is not None and taken.any():
                    yield from _accesses(part, dict(env), taken, sure and holds is not None)
        case For() | Parallel():
            axes = [(s.var, s.start, s.extent)] if isinstance(s, For) else [(v, 0, n) for v, n in zip(s.vars, s.extents)]
            starts, extents = [_number(a) for _, a, _ in axes], [_number(n) for _, _, n in axes]
            size = prod(n or 0 for n in extents)
            if 0 < size * mask.size <= _MOST and None not in starts:
                spread = {v: np.repeat(np.broadcast_to(x, mask.shape), size) for v, x in env.items()}
                points = np.indices([n or 0 for n in extents]).reshape(len(axes), -1)
                spread.update((v, np.tile(p + (first or 0), mask.size)) for (v, _, _), first, p in zip(axes, starts, points))
                yield from _accesses(s.body, spread, np.repeat(mask, size), sure)
            elif size or None in extents:
                names = {v for v, _, _ in axes}
                yield from _accesses(s.body, {v: x for v, x in env.items() if v not in names}, mask, False)


def _value(e: Expr, env: dict[Var, Any]) -> Any:
    try:
        return evaluate(e, env)
    except (TileLangError, TypeError):
        return None


def _number(e: Any) -> int | None:
    return int(e) if isinstance(e, int) else int(e.value) if isinstance(e, Const) else None


def _shape(b: Buffer) -> tuple[int, ...] | None:
    """The shape of a buffer; None for run-time and very large ones."""
    return tuple(map(int, b.shape)) if b.is_static and prod(map(int, b.shape)) <= _MOST else None


def _places(b: Buffer, indices: tuple[Expr, ...] | None, env: dict[Var, Any], mask: Any) -> Any:
    """The elements at some indices; None if they are not known."""
    shape, at = _shape(b), [_value(i, env) for i in indices or ()]
    if shape is None or len(at) != len(shape) or any(v is None or np.ndim(v) > 1 for v in at):
        return None
    at = [np.broadcast_to(v, mask.shape)[mask] for v in at]
    if any((v < 0).any() or (v >= n).any() for v, n in zip(at, shape)):
        return None
    out = np.zeros(shape, bool)
    out[tuple(at)] = True
    return out


def _box(r: Region, env: dict[Var, Any]) -> tuple[Any, bool]:
    """(the elements of a region, None if they are not known; whether it certainly has all of them)."""
    shape, ends = _shape(r.buffer), list(zip((_value(convert(low), env) for low in r.mins), map(_number, r.extents)))
    fixed = [v is not None and n is not None and np.min(v) == np.max(v) for v, n in ends]
    if shape is None:
        return None, False
    out = np.zeros(shape, bool)
    out[tuple(slice(max(int(np.min(v)), 0), int(np.min(v)) + n) if known else slice(None)  # type: ignore[operator]
              for known, (v, n) in zip(fixed, ends))] = True
    return out, all(fixed)


def _meeting(one: _WarpRole, two: _WarpRole) -> Iterator[tuple[_WarpRole, _WarpRole, _Access, _Access]]:
    """Accesses of two warp roles that may meet, one of which stores, and that the program does not order itself."""
    if not (one.meets and two.meets or one.group == two.group):
        for a, b in product(one.accesses, two.accesses):
            if (a.writes or b.writes) and a.buffer.data is b.buffer.data and (
                    a.buffer is not b.buffer or a.places is None or b.places is None or (a.places & b.places).any()):
                yield one, two, a, b


def _check(one: _WarpRole, two: _WarpRole, a: _Access, b: _Access) -> None:
    """Raises "sync-unordered" where two accesses surely meet."""
    first, second = (a, b) if a.writes else (b, a)
    if a.sure and b.sure and a.buffer is b.buffer and set(one.warps).isdisjoint(two.warps):
        raise error("sync-unordered", f"`{a.buffer.name}` is touched by two warp roles that nothing orders",
                    expected="warp roles that wait for each other", found="warp roles that do not wait",
                    span=second.span, notes=((first.span, "stored here by another warp role"),),
                    hint="let them meet at T.sync_threads(id, threads) or at an mbarrier (T.alloc_barrier)")


def _check_votes(s: Stmt, warps: tuple[int, ...], branch: If | None) -> None:
    """Check a statement. warps: those that reach it. branch: the enclosing branch that the others do not take."""
    if isinstance(s, If):
        for part, wanted in ((s.then, True), (s.orelse, False)):
            if part is not None:
                come = tuple(w for w in warps if holds_in(s.cond, w) in (wanted, None))
                _check_votes(part, come, s if come != warps else branch)
        return
    for x in inner(s):
        _check_votes(x, warps, branch)
    if branch is None or inner(s):
        return
    for c in walk(s):
        if isinstance(c, Call) and c.op in _OF_ALL:
            what = "grid" if c.op == "sync_grid" else "block"
            raise error("collective-divergent", f"T.{c.op} takes all threads of the {what}, and only some warps get here",
                        span=c.span or s.span, notes=((branch.span, "entered by some warps only"),),
                        hint="move it out of T.ws, or let the groups tell each other through shared memory and a barrier")
