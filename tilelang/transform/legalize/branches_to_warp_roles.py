"""Turn branches on the thread number that whole warps take into warp roles, as T.ws makes them.

    t = T.get_thread_binding()                if in_warp_groups(0): P
    if t < 128: P                       ->    if in_warp_groups(1, 2): C
    elif t >= 128 and t < 384: C              if in_warp_groups(12, 1, size=32): L     # a warp
    elif t < 416: L

    for w in T.unroll(4):                     if in_warp_groups(0, 1, size=32): S with w = 0
        if t // 32 == w: S              ->    …

Only branches that hold tile operations, parallel loops or waits are changed; others stay code of single threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang.ir import (Binary, Bind, Break, Call, Const, Continue, Expr, For, If, Launch, Load, Parallel, Seq, Stmt, TileOp,
                         While, const, contains, free_vars, inner, replace, seq, stmts_of, substitute, walk, with_inner, EMPTY,
                         PRIVATE)
from tilelang.target.warp_groups import GROUP, PER_GROUP, WARP_LANES, in_some_warps, runs, warps_of
from tilelang.ops import Copy

from ..analysis.divergence import Divergence, WarpSets
from ..analysis.statements import rename
from ..check.check_hopper import WAITS
from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE, of=Launch)
def branches_to_warp_roles(n: Launch, cx: PassContext) -> Any:
    """Make warp roles of branches whose conditions depend only on the thread number and are uniform in each warp.

    Applies to every target. The arms of an if/elif chain become separate branches; each thread takes one of them as before.
    Warp roles inside each other are cut to the warps that reach them. A condition `t < 32 and c` becomes a branch inside the
    warp role. Branches that only wait become warp roles where they take whole warp groups.
    """
    return None if n.num_threads <= WARP_LANES or n.num_threads % WARP_LANES else with_inner(n, _Branches(n).stmt)


class _Branches:
    """here: the warps that reach the statement being visited."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.sets = launch, WarpSets(launch)
        self.here = self.all = frozenset(self.sets.warps)
        self.groups = launch.num_threads > GROUP and launch.num_threads % GROUP == 0 and launch.threads[1:] == (1, 1)
        self.divergence: Divergence | None = None

    def stmt(self, s: Stmt) -> Stmt:
        match s:
            case Bind():
                self.sets.bind(s.var, s.value)
            case For() if self.by_warp(s):
                first, count = int(s.start.value), int(s.extent.value)  # type: ignore[attr-defined]
                copies = (substitute(s.body, {s.var: const(first + k, s.var.dtype)}) for k in range(count))
                return self.stmt(seq(*(seq(*rename(list(stmts_of(x))), span=x.span) for x in copies), span=s.span))
            case Seq() | For() | While():
                return with_inner(s, self.stmt)  # type: ignore[no-any-return]
            case If():
                return self.branch(s)
        return s

    def by_warp(self, s: For) -> bool:
        """Whether a loop gives each warp an iteration: its variable and the thread number decide who does tile operations."""
        if s.kind not in ("serial", "unroll") or not isinstance(s.start, Const) or not isinstance(s.extent, Const) or \
                not 0 < s.extent.value <= len(self.all) or contains(s.body, Break, Continue):
            return False
        names = {x.var: x.value for x in walk(s.body, Bind)}
        return any(_tiles(x) and s.var in free_vars(cond := substitute(x.cond, names)) and self.sets.follows(cond)
                   for x in walk(s.body, If))

    def branch(self, s: If) -> Stmt:
        taken = self.sets.taken(s.cond, self.here)
        if taken is None and s.orelse is None and _tiles(s) and (conds := self.conjuncts(s.cond)) is not None:
            return self.branch(replace(s, cond=conds[0], then=If(conds[1], s.then, None, span=s.span)))
        if taken is None:
            return self.sides(s) if self.uniform(s.cond) else s
        given = [some for c in walk(s.cond, Call) if (some := warps_of(c)) is not None]
        if self.here == self.all and given and not any(sum(some) > len(self.all) for some in given):
            return self.sides(s, taken)
        if not _tiles(s) and not (self.groups and self.here == self.all and _waits(s) and all(
                first % PER_GROUP == n % PER_GROUP == 0 for first, n in runs(taken))):
            return s
        arms = []
        for warps, body in self.arms(s, self.here):
            body = self.within(warps, body)
            arms.append(body if warps == self.here else If(in_some_warps(warps), body, None, span=s.span))
        return seq(*arms, span=s.span) if arms else EMPTY

    def conjuncts(self, cond: Expr) -> tuple[Expr, Expr] | None:
        """A condition as (what whole warps decide, the rest); None where it is no such conjunction."""
        if isinstance(cond, Binary) and cond.op == "and":
            for one, other in ((cond.a, cond.b), (cond.b, cond.a)):
                if self.sets.taken(one, self.here) is not None:
                    return one, other
        return None

    def arms(self, s: Stmt, warps: frozenset[int]) -> Iterator[tuple[frozenset[int], Stmt]]:
        """The arms of an if/elif chain that these warps run, each with its warps."""
        taken = self.sets.taken(s.cond, warps) if isinstance(s, If) else None
        if not isinstance(s, If) or taken is None:
            if warps:
                yield warps, s
            return
        for x, come in zip(inner(s), (taken, warps - taken)):
            yield from self.arms(x, come)

    def within(self, warps: frozenset[int], s: Stmt) -> Stmt:
        """A statement that these warps alone reach."""
        before, self.here = self.here, warps
        out = self.stmt(s)
        self.here = before
        return out

    def sides(self, s: If, taken: frozenset[int] | None = None) -> Stmt:
        """A branch whose condition stays.  taken: the warps that take it, None: it does not distinguish them."""
        yes, no = (self.here, self.here) if taken is None else (taken, self.here - taken)
        return with_inner(s, lambda x: self.within(yes if x is s.then else no, x))  # type: ignore[no-any-return]

    def uniform(self, e: Expr) -> bool:
        """Whether a condition is the same for all threads, as far as this pass must know."""
        if self.sets.follows(e):
            return False
        if not any(isinstance(n, Load) and n.buffer.scope_name in PRIVATE for n in walk(e)):
            return True
        self.divergence = self.divergence or Divergence(self.launch)
        return not self.divergence.divergent(e)


def _tiles(s: If) -> bool:
    """Whether a branch holds work that its threads do together."""
    return any(isinstance(n, Parallel) or isinstance(n, TileOp) and not (
        isinstance(n, Copy) and n.plan.by_hand and n.plan.leader_scope) and not any(
            a.region.buffer.scope_name in PRIVATE for a in n.accesses()) for n in walk(s))  # type: ignore[attr-defined]


def _waits(s: If) -> bool:
    return any(c.op in WAITS for c in walk(s, Call)) and not contains(s.cond, Call)
