"""Put block barriers between warp roles that touch one element of shared memory and that nothing else orders.

    with T.ws(0):                               with T.ws(0):
        S[tx] = A[tx]                    ->         S[tx] = A[tx]
    with T.ws(1):                               T.sync_threads()
        B[tx - 128] = S[255 - tx]               with T.ws(1): …
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, reduce
from itertools import product
from typing import Any

from tilelang.arith import Analyzer, Bounds, extent_bounds
from tilelang.errors import error
from tilelang.ir import (AddressOf, Alloc, Bind, Call, Const, Expr, For, If, Launch, Load, Parallel, Region, Seq, Stmt, TileOp,
                         Var, While, const, convert, fresh, inner, is_const, logical, remember, replace, rewrite, seq,
                         substitute, unary, walk, with_inner, BARRIER, CLUSTER_BARRIER, SHARED)
from tilelang.ir.record import record
from tilelang.target.intrinsics import INTRINSICS, PURE, SYNC, WARP
from tilelang.target.warp_groups import WARP_LANES, holds_in, runs, warps_in, ways_of_warps

from ..analysis.access_table import Reach, separate
from ..analysis.disjoint import Disjoint, Place
from ..analysis.divergence import Divergence
from ..analysis.effects import Effect, effects, own_effects, tile_of
from ..analysis.statements import BARRIERS, barrier
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_

_ITERATIONS = 8  # of a loop around warp roles that are followed
# Calls that order nothing between warps, beside the pure ones.
_OWN = frozenset(("sync_threads", "sync_warp", "cp_async", "cp_async_commit", "cp_async_wait", "printf", "set_max_nreg",
                  "ldmatrix", "stmatrix", "mma", "fence_proxy_async", "assume"))
# Calls that other warps wait for, and that wait for nothing.
_SIGNALS = frozenset(("named_barrier_arrive", "mbarrier_init", "mbarrier_arrive", "mbarrier_expect_tx",
                      "mbarrier_arrive_expect_tx", "mbarrier_arrive_remote", "cp_async_mbarrier_arrive", "fence_mbarrier_init"))
_OF_ALL = BARRIERS - {"sync_threads"}  # sync_threads in a warp role counts only its threads
_Warps = tuple[int, ...]


@pass_(needs=TILE, of=Launch)
def order_warp_roles(launch: Launch, cx: PassContext) -> Launch:
    """Put a barrier of all threads in front of a warp role that touches what another warp role in front of it stores, or stores
    what it touches, also from one iteration of a loop to the next.

    It stands where all threads pass, and where no warp role in front of it waits for another.  Warp roles order themselves
    where they hold a named barrier, mbarrier, atomic, while loop or call of unknown effect.  What is left without an order is
    checked by verify_sync, which knows all addresses.
    Raises "sync-unordered" where no barrier may stand between accesses that certainly meet, and "collective-divergent" for
    votes of the block and barriers of the grid that only some warps reach: on a device the groups that get there would wait
    for the others, or would be counted with groups that vote about something else.
    """
    order = _Order(launch)
    if not cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC) and len(order.warps) > 1 and order.among(launch.body):
        order.follow(launch.body)
    _check_votes(launch.body, order.warps, None)
    return replace(launch, body=order.written(launch.body)) if order.before else launch  # type: ignore[no-any-return]


class _Order:
    """Follows the warp roles of a block in program order.

    before: statements (by id) that a barrier precedes.  pending: warp roles since the last barrier of all threads.  legal:
    whether all of the warps come here alike.  names: values of bindings seen so far, and of the variables of loops, but of
    those in `open`, which are not known.  stretch: number of the present run of branches by warp with nothing else in between;
    start: of the last one before the innermost loop's iteration, whose statements are `body`.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch, self.warps, self.legal = launch, warps_in(launch), True
        self.before: set[int] = set()
        self.names: dict[Var, Expr] = {}
        self.open: set[Var] = set()
        self.pending: list[_WarpRole] = []
        self.stretch, self.start, self.body = 0, -1, launch.body

    @cached_property
    def divergence(self) -> Divergence:
        return Divergence(self.launch)

    def among(self, s: Stmt) -> bool:
        """Whether there are branches by warp below a statement."""
        return any(come for x in walk(s, If) for come, _ in ways_of_warps(x, self.warps) or ())

    def written(self, s: Stmt) -> Stmt:
        """A statement with its barriers."""
        out: Stmt = with_inner(s, self.written)
        return seq(barrier(s), out, span=s.span) if id(s) in self.before else out

    def follow(self, s: Stmt) -> None:
        """Follow a statement that all of the warps reach."""
        if id(s) in self.before:
            self.pending = []
        if isinstance(s, If) and (parts := ways_of_warps(s, self.warps)) is not None:
            parts = [(come, body) for come, body in parts if come]
            self.roles(s, [_WarpRole(self, come, body, len(parts) == 1) for come, body in parts])
            return
        self.stretch += not isinstance(s, Seq)
        if isinstance(s, Seq):
            for x in s.stmts:
                self.follow(x)
        elif isinstance(s, Bind):
            remember(self.names, s)
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
        kept = self.legal, self.start, self.body
        self.legal &= not self.divergence.uneven(s)
        for k in range(min(2 if first is None else _ITERATIONS, _ITERATIONS if extent is None else extent)):
            if isinstance(s, For):
                self.open.add(s.var)
                if first is not None:
                    self.names[s.var] = const(first + k, s.var.dtype)
            self.start, self.body = self.stretch, s.body
            self.stretch += 1
            self.follow(s.body)
        self.legal, self.start, self.body = kept

    def roles(self, s: Stmt, roles: list[_WarpRole]) -> None:
        """Follow a branch by warp; its ways run at the same time."""
        own = roles[0]
        near = [x for x in self.pending if x.stretch == self.stretch and not set(x.warps).isdisjoint(own.warps)]
        if near and own.alone and near[-1].alone and near[-1].warps == own.warps:
            own.group = near[-1].group
        met = [(one, two) for two in roles for one in self.pending if any(True for _ in _meeting(one, two))]
        if met and self.legal and not any(x.waits for x in self.pending):
            carried = all(one.stretch <= self.start for one, _ in met)  # from an iteration before: the barrier may stand first
            self.before.add(id(self.body if carried else s))
            self.pending = [x for x in self.pending if carried and x.stretch > self.start]
            met = []
        for one, two in (*met, *((one, two) for k, two in enumerate(roles) for one in roles[:k])):
            for x in _meeting(one, two):
                _check(*x)
        self.pending += roles


@record
class _Access:
    """An access of shared memory by some threads.  place: None where it is not known.  reach: where it is, (first, end) in each
    dimension.  sure: whether all of that is surely accessed."""

    effect: Effect
    place: Place | None
    reach: Reach | None
    sure: bool
    span: Any


class _WarpRole:
    """A warp role: whether it may order itself with others (meets), whether it may wait for them, and its accesses.

    ranges: of the variables that each access has for itself.  group: place_sync orders the accesses of warp roles of one
    group, which are code of the same warps with only code of other warps in between.
    """

    def __init__(self, order: _Order, warps: _Warps, body: Stmt, alone: bool) -> None:
        self.launch, self.warps, self.body, self.alone = order.launch, warps, body, alone
        self.names, self.stretch, self.group = dict(order.names), order.stretch, id(body)
        self.ranges: dict[Var, Bounds] = {v: (None, None) for v in order.open}
        signals = any(isinstance(n, While) or isinstance(n, TileOp) and _signals(n) for n in walk(body))
        self.waits = signals or any(map(_waits, walk(body, Call)))
        self.meets = signals or any(not _own(n) for n in walk(body, Call))

    @cached_property
    def accesses(self) -> list[_Access]:
        n = self.launch
        self.ranges.update((v, (0, k - 1)) for v, k in zip(n.thread_vars, n.threads))
        thread = n.thread_vars[0] + n.threads[0] * (n.thread_vars[1] + n.threads[1] * n.thread_vars[2])
        ours = [logical("and", thread >= first * WARP_LANES, thread < (first + count) * WARP_LANES)
                for first, count in runs(self.warps)]
        low, high = min(self.warps) * WARP_LANES, min((max(self.warps) + 1) * WARP_LANES, n.num_threads)
        self.here = {n.thread_vars[0]: (low, high - 1)} if n.threads[1:] == (1, 1) else {}
        return list(self.below(self.body, (reduce(lambda a, b: logical("or", a, b), ours),), True))

    def below(self, s: Stmt, conds: tuple[Expr, ...], sure: bool) -> Iterator[_Access]:
        """The accesses below a statement.  sure: whether it surely runs."""
        for e in own_effects(s):
            if e.buffer.scope_name in SHARED:
                yield self.access(e, conds, sure, getattr(s, "span", None))
        if isinstance(s, Bind):
            remember(self.names, s)
        if isinstance(s, (For, Parallel)):
            for v, start, n in [(s.var, s.start, s.extent)] if isinstance(s, For) else [(v, 0, n) for v, n in zip(
                    s.vars, s.extents)]:
                sure = sure and (_number(n) or 0) > 0
                self.ranges[v] = extent_bounds(Analyzer(self.ranges), self.value(convert(start)), self.value(convert(n)))
        for x in inner(s):
            if isinstance(s, If):
                cond = self.value(s.cond)
                taken = cond if x is s.then else unary("not", cond)
                if not is_const(taken, 0):
                    yield from self.below(x, (*conds, taken), sure and is_const(taken))
            else:
                yield from self.below(x, conds, sure and not isinstance(s, While))

    def value(self, e: Expr) -> Expr:
        """An expression of numbers of threads, variables of loops, and what an access has for itself."""
        e = substitute(e, self.names)
        return Analyzer().simplify(rewrite(e, lambda x: self.unknown(x.dtype, None), Load, Call))

    def unknown(self, dt: Any, count: int | None) -> Var:
        v = fresh("own", dt)
        self.ranges[v] = (None, None) if count is None else (0, count - 1)
        return v

    def access(self, e: Effect, conds: tuple[Expr, ...], sure: bool, span: Any) -> _Access:
        if (tile := tile_of(e)) is None:
            return _Access(e, None, None, False, span)
        mins = [self.value(convert(m)) for m in tile[0]]
        counts = [*map(_number, tile[1])]
        at = tuple(m if n == 1 else m + self.unknown(m.dtype, n) for m, n in zip(mins, counts))
        bounds = [Analyzer({**self.ranges, **self.here}).interval(i) for i in at]
        reach = [(low, high + 1) for low, high in bounds if low is not None and high is not None]
        sure = sure and e.region is not None and all(map(is_const, mins)) and None not in counts
        return _Access(e, Place(e.buffer, at, conds), reach if len(reach) == len(at) else None, sure, span)


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


def _number(e: Any) -> int | None:
    return int(e) if isinstance(e, int) else int(e.value) if isinstance(e, Const) else None


def _meeting(one: _WarpRole, two: _WarpRole) -> Iterator[tuple[_WarpRole, _WarpRole, _Access, _Access]]:
    """Accesses of two warp roles that may meet, one of which stores, and that the program does not order itself."""
    if not (one.meets and two.meets or one.group == two.group):
        for a, b in product(one.accesses, two.accesses):
            if (a.effect.writes or b.effect.writes) and a.effect.storage is b.effect.storage and not (
                    a.effect.buffer is b.effect.buffer and separate(a.reach, b.reach)) and (
                    a.place is None or b.place is None or
                    not Disjoint(Analyzer(), None, {**one.ranges, **two.ranges}).proves(a.place, b.place)):
                yield one, two, a, b


def _check(one: _WarpRole, two: _WarpRole, a: _Access, b: _Access) -> None:
    """Raises "sync-unordered" where two accesses surely meet."""
    first, second = (a, b) if a.effect.writes else (b, a)
    if a.sure and b.sure and a.effect.buffer is b.effect.buffer and set(one.warps).isdisjoint(two.warps):
        raise error("sync-unordered", f"`{a.effect.buffer.name}` is touched by two warp roles that nothing orders",
                    expected="warp roles that wait for each other", found="warp roles that do not wait",
                    span=second.span, notes=((first.span, "stored here by another warp role"),),
                    hint="let them meet at T.sync_threads(id, threads) or at an mbarrier (T.alloc_barrier)")


def _check_votes(s: Stmt, warps: tuple[int, ...], branch: If | None) -> None:
    """Check a statement. warps: those that reach it. branch: the enclosing branch that the others do not take."""
    if isinstance(s, If):
        for part, wanted in zip(inner(s), (True, False)):
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
