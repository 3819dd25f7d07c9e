"""Warps that run different code: the statements of each warp role, and the barriers between them.

Warps that no T.ws distinguishes are one warp role.  A warp role runs the launch's body for its threads:

    A                                warp role 0: A, once for the block; C
    with T.ws(1): P         ->                    B, once for the block
    with T.ws(0): C                  warp role 1: A, once for the block; P
    B                                             B, once for the block

Tile operations and parallel loops outside of T.ws run once, by the last warp role that arrives (OncePerBlock).  Each warp role
runs statements of the threads there for its own threads, between two barriers of the warp roles where they access shared
memory or tensors that the launch stores in.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Binary, Bind, Call, Evaluate, Expr, For, If, Launch, Load, Parallel, Region, Seq, Stmt,
                         Store, TileOp, While, call, const, controls, replace, rewrite, seq, walk, with_inner, with_options,
                         EMPTY, FRAGMENT, GLOBAL, SHARED)
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import OncePerBlock, WarpRole, is_private
from tilelang.target.thread_calls import BLOCK_VOTES, CLUSTER_CALLS
from tilelang.target.warp_groups import WARP_LANES, alike, holds_in, runs
from tilelang.ops import Copy

from ..analysis.divergence import Kind, LaneValues
from .thread_conflicts import Conflicts
from .thread_loops import check_uniform
from .varying_values import find_varying_values, rereads_shared, some_exit_early, touches_private

_WAITS = ("mbarrier_wait", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "named_barrier", "named_barrier_arrive", "sync_grid")
_BY_ADDRESS = ("wgmma", "wgmma_descriptor", "tma_load")  # their misuse ends the call as a deadlock does
_COROUTINE_CALLS = frozenset({*_WAITS, *CLUSTER_CALLS, *_BY_ADDRESS, "in_warp_groups"} - {"cluster_size"})


def needs_coroutines(launch: Launch) -> bool:
    """Whether warp groups of a block, or its blocks, wait for each other, or name shared memory by address."""
    return any(n.op in _COROUTINE_CALLS if isinstance(n, Call) else n.plan.dst_block is not None
               for n in walk(launch.body, Call, Copy))


def warp_roles_of(launch: Launch) -> list[WarpRole]:
    """The warp roles of a launch: one when nothing distinguishes its warps."""
    total, out = launch.num_threads, []
    for k, warps in enumerate(alike(launch)):
        ranges = ((first * WARP_LANES, min((first + n) * WARP_LANES, total)) for first, n in runs(warps))
        out.append(WarpRole(k, warps, tuple(ranges)))
    return out


def split_warp_roles(launch: Launch) -> tuple[tuple[tuple[WarpRole, Launch], ...], int]:
    """(warp role, what it runs) for each warp role of a launch, and the number of barriers between them (see above).

    Keeps: where one warp role accesses what another writes outside of T.ws, a barrier of the warp roles stands between.
    Raises cpu-unsupported for threads of several warp roles that exchange values under a divergent condition.
    """
    split = _Split(launch)
    launches = tuple((r, split.launch_of(r)) for r in split.warp_roles)
    return launches, len(split.barriers)


class _Split:
    """The launch of each warp role.  barriers: (statement, position) -> number of a barrier, the same in every warp role.
    stored: tensors that threads store in."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.warp_roles = launch, warp_roles_of(launch)
        self.here = self.warp_roles  # those that reach the statement being visited
        self.barriers: dict[tuple[int, int], int] = {}
        self.values = find_varying_values(launch)
        self.stored = {n.buffer.data for n in walk(launch.body, Store) if n.buffer.scope() == GLOBAL}

    def launch_of(self, warp_role: WarpRole) -> Launch:
        """The statements that a warp role runs."""
        body = self._visit(self.launch.body, warp_role)

        def known(n: Any) -> Any:
            got = holds_in(n, warp_role.warps[0]) if isinstance(n, Call) and n.op == "in_warp_groups" else None
            return None if got is None else const(got)

        return replace(self.launch, body=rewrite(body, known))

    def _number(self, s: Stmt, position: int) -> int:
        return self.barriers.setdefault((id(s), position), len(self.barriers))

    @property
    def _meeting(self) -> int:
        """How many warp roles meet at a barrier here, 0: all of the block that have not ended."""
        return 0 if len(self.here) == len(self.warp_roles) else len(self.here)

    def _visit(self, s: Stmt, warp_role: WarpRole, divergent: bool = False) -> Stmt:
        """s for a warp role.  divergent: a condition keeps some threads of the warp roles that are here from it."""
        alone = len(self.here) == 1

        def varies(e: Any) -> bool:
            return holds_in(e, warp_role.warps[0]) is None and self.values.varies(e)

        match s:
            case Seq():
                return seq(*(self._visit(x, warp_role, divergent) for x in s.stmts), span=s.span)
            case If():
                holds = holds_in(s.cond, warp_role.warps[0])
                if holds is not None:
                    side = s.then if holds else s.orelse
                    if side is None:
                        return EMPTY
                    before = self.here
                    self.here = [r for r in before if holds_in(s.cond, r.warps[0]) is holds]
                    out = self._visit(side, warp_role, divergent and len(self.here) > 1)
                    self.here = before
                    return out
                if not alone and not divergent and self.values.varies(s.cond):
                    self._reject_exchange(s)
                    return self._between_barriers(s, self._sides(s, warp_role, True))
                branch = self._sides(s, warp_role, divergent)
                return branch if alone or divergent or not self._is_ordered(s.cond) else seq(self._barrier(s, 1), branch)
            case For() | While():
                inner = divergent or not alone and (self.values.varies(controls(s)) or some_exit_early(varies, s.body))
                if inner and not divergent:
                    self._reject_exchange(s)
                loop = replace(s, body=self._visit(s.body, warp_role, inner))
                if not inner and not alone and any(map(self._is_ordered, controls(s))):
                    return seq(self._barrier(s, 1), loop)
                return loop if divergent or not inner else self._between_barriers(s, loop)
        return s if alone else self._of_some_threads(s) if divergent else self._of_all_warp_roles(s)

    def _reject_exchange(self, s: Stmt) -> None:
        """Raises cpu-unsupported where threads of several warp roles access each other's elements in s."""
        if not rereads_shared(s) or isinstance(s, If) and s.orelse is None and self._of_one_warp_role(s.cond):
            return
        if Conflicts(self.launch, self.values).exist_in(s):
            raise unsupported("threads of several warp roles that exchange values in a branch or loop that not all run alike",
                              span=s.span, hint="let all threads run the loop or branch and put the condition inside it")

    def _of_one_warp_role(self, cond: Expr) -> bool:
        """Whether a condition on the thread indices holds for threads of one warp role only."""
        holds = LaneValues(self.launch).value(cond)
        if isinstance(holds, Kind):
            return isinstance(cond, Binary) and cond.op == "and" and any(map(self._of_one_warp_role, (cond.a, cond.b)))
        through = np.broadcast_to(holds, self.launch.num_threads)
        return sum(any(through[lo:hi].any() for lo, hi in r.ranges) for r in self.warp_roles) < 2

    def _sides(self, s: If, warp_role: WarpRole, divergent: bool) -> If:
        return with_inner(s, lambda x: self._visit(x, warp_role, divergent))  # type: ignore[no-any-return]

    def _of_some_threads(self, s: Stmt) -> Stmt:
        """A statement that some threads execute, whatever their warp role: nothing that the block does as one."""
        barrier = isinstance(s, Evaluate) and s.call.op in ("sync_threads", *BLOCK_VOTES)
        if barrier or isinstance(s, Parallel) or isinstance(s, TileOp) and not touches_private(s):
            raise unsupported("a tile operation, T.Parallel or a barrier under a condition that depends on the thread",
                              span=s.span, hint="move it out of the branch: all threads of the block take part in it")
        return s

    def _of_all_warp_roles(self, s: Stmt) -> Stmt:
        """A statement that all warp roles execute."""
        if any(n.op in BLOCK_VOTES for n in walk(s, Call)):
            return self._between_barriers(s, self._number_votes(s))
        if isinstance(s, Parallel) or isinstance(s, TileOp) and not touches_private(s):
            check_uniform(self.values, s)
            return OncePerBlock(s, self._number(s, 0), self._meeting, span=s.span)
        if isinstance(s, Store) and not is_private(s.buffer) and not self.values.varies((s.value, *s.indices)):
            if self._is_ordered(s) or any(n.buffer.data is s.buffer.data for n in walk(s.value, Load)):
                return OncePerBlock(s, self._number(s, 0), self._meeting, span=s.span)
        if isinstance(s, Evaluate) and s.call.op == "sync_threads":
            return self._barrier(s, 0)
        return self._between_barriers(s, s) if isinstance(s, (Bind, Store, Evaluate, TileOp)) else s

    def _number_votes(self, s: Stmt) -> Stmt:
        """s, whose votes of the block are barriers of the warp roles: each adds up the votes of its own threads.

        A vote has three numbers: its barrier, the votes and voters so far, the answer.
        """
        positions = itertools.count(3, 3)

        def number(n: Any) -> Any:
            if not isinstance(n, Call) or n.op not in BLOCK_VOTES:
                return None
            k = next(positions)
            first, *_ = (self._number(s, k + i) for i in range(3))
            return with_options(n, key=first, arriving=self._meeting)

        return rewrite(s, number)

    def _between_barriers(self, s: Stmt, of_warp_role: Stmt) -> Stmt:
        return seq(self._barrier(s, 1), of_warp_role, self._barrier(s, 2)) if self._is_ordered(s) else of_warp_role

    def _is_ordered(self, s: Any) -> bool:
        """Whether a statement or expression accesses memory that warp roles have in common: shared memory, fragments, and
        tensors that the launch stores in."""
        return any(n.buffer.scope() in (FRAGMENT, *SHARED) or n.buffer.data in self.stored
                   for n in walk(s, Load, Store, Region, AddressOf))

    def _barrier(self, s: Stmt, position: int) -> Stmt:
        barrier = call("warp_role_barrier", (), "void", key=self._number(s, position), arriving=self._meeting)
        return Evaluate(barrier, span=s.span)
