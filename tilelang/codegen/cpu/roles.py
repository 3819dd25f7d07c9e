"""Warp groups that run different code: each is followed by itself, and waits where it has to (actors.py).

Warp groups that no T.ws tells apart are one role.  A role runs the launch's body as it is for its threads:

    A                                role 0: A together with the others; S
    with T.ws(1): P         ->               C; B together with the others
    with T.ws(0): C                  role 1: A together with the others; S
    B                                        P; B together with the others

Tile operations and parallel loops outside T.ws are one action of all roles, done by the last that comes (`Together`).
Statements of the threads there are each role's for its own threads, between two meetings where they touch shared
memory or tensors that the launch stores in.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.ir import (
    EMPTY,
    AddressOf,
    Binary,
    Bind,
    Break,
    Call,
    Cast,
    Const,
    Continue,
    Evaluate,
    Expr,
    For,
    If,
    Launch,
    Load,
    Parallel,
    Region,
    Seq,
    Stmt,
    Store,
    TileOp,
    Var,
    While,
    call,
    const,
    replace,
    rewrite,
    seq,
    walk,
    with_options,
)
from tilelang.ir.evaluate import evaluate
from tilelang.target.warp_groups import GROUP, alike, holds_in

from .clusters import CLUSTER_CALLS
from .crossings import Crossings
from .lanes import BLOCK_VOTES
from .threads import Threads, Together, check_uniform, is_private, meets_itself, of_each, spread
from .types import unsupported

ADDRESSES = ("wgmma", "wgmma_descriptor", "tma_load")  # their misuse ends the call as a deadlock does
WAITS = ("mbarrier_wait", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "named_barrier", "named_barrier_arrive", "sync_grid")


@dataclass(frozen=True)
class Role:
    """Warp groups that run the same code.  ranges: their threads, from and up to."""

    number: int
    groups: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def threads(self) -> int:
        return sum(hi - lo for lo, hi in self.ranges)


def needs_roles(launch: Launch) -> bool:
    """Whether parts of a block, or its blocks, wait for each other, or name shared memory by address."""
    calls = {*WAITS, *CLUSTER_CALLS, *ADDRESSES, "in_warp_groups"} - {"cluster_size"}
    return any(isinstance(n, Call) and n.op in calls or isinstance(n, TileOp) and n.attr("dst_block") is not None
               for n in walk(launch.body))


def roles_of(launch: Launch) -> list[Role]:
    """The roles of a launch: one when nothing tells its warp groups apart."""
    total, out = launch.num_threads, []
    for k, groups in enumerate(alike(launch)):
        ranges: list[tuple[int, int]] = []
        for g in groups:
            lo, hi = g * GROUP, min((g + 1) * GROUP, total)
            if ranges and ranges[-1][1] == lo:
                lo = ranges.pop()[0]
            ranges.append((lo, hi))
        out.append(Role(k, groups, tuple(ranges)))
    return out


@dataclass
class Split:
    """The launch of each role.  keys: numbers of the meetings, the same for a statement in every role."""

    launch: Launch
    roles: list[Role] = field(init=False)
    keys: dict[tuple[int, int], int] = field(default_factory=dict)
    threads: Threads = field(init=False)
    written: set[Var] = field(init=False)  # tensors that threads store in

    def __post_init__(self) -> None:
        self.roles = roles_of(self.launch)
        self.written = {n.buffer.data for n in walk(self.launch.body) if isinstance(n, Store) and n.buffer.scope() == "global"}
        self.threads = spread(self.launch)

    def of(self, role: Role) -> Launch:
        """What a role runs."""
        body = self._fold(self.launch.body, role, len(self.roles) == 1)

        def known(n: Any) -> Any:
            got = holds_in(n, role.groups[0]) if isinstance(n, Call) and n.op == "in_warp_groups" else None
            return None if got is None else const(got)

        return replace(self.launch, body=rewrite(body, known))

    def _key(self, s: Stmt, k: int) -> int:
        return self.keys.setdefault((id(s), k), len(self.keys))

    def _fold(self, s: Stmt, role: Role, own: bool, apart: bool = False) -> Stmt:
        """s for a role.  own: under T.ws, where only this role comes.  apart: under a condition of the threads instead."""
        match s:
            case Seq():
                return seq(*(self._fold(x, role, own, apart) for x in s.stmts), span=s.span)
            case If():
                got = holds_in(s.cond, role.groups[0])
                if got is not None:
                    part = s.then if got else s.orelse
                    return EMPTY if part is None else self._fold(part, role, True)
                if not own and not apart and self.threads.varies(s.cond):
                    self._refuse_exchange(s)
                    return self._each(s, self._parts(s, role, False, True))
                part = self._parts(s, role, own, apart)
                return part if own or apart or not self._shared(s.cond) else seq(self._meet(s, 1), part)
            case For() | While():
                asked = (s.start, s.extent) if isinstance(s, For) else s.cond
                inner = apart or not own and (self.threads.varies(asked) or self._left(s.body, role, False))
                if inner and not apart:
                    self._refuse_exchange(s)
                part = replace(s, body=self._fold(s.body, role, own, inner))
                if not inner and not own and any(map(self._shared, (s.start, s.extent) if isinstance(s, For) else (s.cond,))):
                    return seq(self._meet(s, 1), part)
                return part if apart or not inner else self._each(s, part)
        return s if own else self._apart(s) if apart else self._common(s)

    def _left(self, s: Stmt | None, role: Role, some: bool) -> bool:
        """Whether some threads of a role alone come to a break or continue of the loop around s."""
        if isinstance(s, If):
            inner = some or holds_in(s.cond, role.groups[0]) is None and self.threads.varies(s.cond)
            return self._left(s.then, role, inner) or self._left(s.orelse, role, inner)
        if isinstance(s, Seq):
            return any(self._left(x, role, some) for x in s.stmts)
        return some and isinstance(s, (Break, Continue))

    def _refuse_exchange(self, s: Stmt) -> None:
        """Raises cpu-unsupported where threads of several roles touch each other's places in s, which each runs by itself."""
        if not meets_itself([s]) or isinstance(s, If) and s.orelse is None and self._of_one_role(s.cond):
            return
        if Crossings(self.launch, self.threads).crosses(s):
            raise unsupported("threads of several roles that exchange values in a branch or loop that not all run alike",
                              span=s.span, hint="let all threads run the loop or branch and put the condition inside it")

    def _of_one_role(self, cond: Expr) -> bool:
        """Whether a condition on the number of the thread lets threads of one role through."""
        if isinstance(cond, Binary) and cond.op == "and" and not all(map(self._numbers_threads, (cond.a, cond.b))):
            return self._of_one_role(cond.a) or self._of_one_role(cond.b)
        if not self._numbers_threads(cond):
            return False
        x, y, _ = self.launch.threads
        t = np.arange(self.launch.num_threads, dtype=np.int32)
        through = evaluate(cond, dict(zip(self.launch.thread_vars, (t % x, t // x % y, t // (x * y)))))
        through = np.broadcast_to(through, t.shape)
        return sum(any(through[lo:hi].any() for lo, hi in r.ranges) for r in self.roles) < 2

    def _numbers_threads(self, e: Expr) -> bool:
        return all(isinstance(n, (Binary, Cast, Const)) or n in self.launch.thread_vars for n in walk(e) if isinstance(n, Expr))

    def _parts(self, s: If, role: Role, own: bool, apart: bool) -> If:
        orelse = None if s.orelse is None else self._fold(s.orelse, role, own, apart)
        return replace(s, then=self._fold(s.then, role, own, apart), orelse=orelse)

    def _apart(self, s: Stmt) -> Stmt:
        """A statement that some threads come to, whatever their role: nothing that the block does as one."""
        barrier = isinstance(s, Evaluate) and s.call.op in ("sync_threads", *BLOCK_VOTES)
        if barrier or isinstance(s, Parallel) or isinstance(s, TileOp) and not of_each(s):
            raise unsupported("a tile operation, T.Parallel or a barrier under a condition that depends on the thread",
                              span=s.span, hint="move it out of the branch: all threads of the block take part in it")
        return s

    def _common(self, s: Stmt) -> Stmt:
        """A statement that all roles come to."""
        if any(isinstance(n, Call) and n.op in BLOCK_VOTES for n in walk(s)):
            return self._each(s, self._votes(s))
        if isinstance(s, Parallel) or isinstance(s, TileOp) and not of_each(s):
            check_uniform(self.threads, s)
            return Together(s, self._key(s, 0), span=s.span)
        if isinstance(s, Store) and not is_private(s.buffer) and not self.threads.varies((s.value, *s.indices)):
            if self._shared(s) or any(isinstance(n, Load) and n.buffer.data is s.buffer.data for n in walk(s.value)):
                return Together(s, self._key(s, 0), span=s.span)
        if isinstance(s, Evaluate) and s.call.op == "sync_threads":
            return self._meet(s, 0)
        return self._each(s, s) if isinstance(s, (Bind, Store, Evaluate, TileOp)) else s

    def _votes(self, s: Stmt) -> Stmt:
        """s, whose votes of the block are meetings: roles add up what their own threads answer.

        A vote has three numbers: its meeting, the yeses and voters so far, the answer.
        """
        places = itertools.count(3, 3)

        def number(n: Any) -> Any:
            if not isinstance(n, Call) or n.op not in BLOCK_VOTES:
                return None
            k = next(places)
            first, *_ = (self._key(s, k + i) for i in range(3))
            return with_options(n, key=first)

        return rewrite(s, number)

    def _each(self, s: Stmt, part: Stmt) -> Stmt:
        return seq(self._meet(s, 1), part, self._meet(s, 2)) if self._shared(s) else part

    def _shared(self, s: Any) -> bool:
        """Whether a statement or expression touches memory in which threads find what others stored, as barriers order it:
        shared memory, and tensors that the launch stores in."""
        return any(isinstance(n, (Load, Store, Region, AddressOf)) and (
            n.buffer.scope() in ("shared", "shared.dyn") or n.buffer.data in self.written) for n in walk(s))

    def _meet(self, s: Stmt, k: int) -> Stmt:
        return Evaluate(call("role_meet", (), "void", key=self._key(s, k)), span=s.span)


__all__ = ["Role", "Split", "needs_roles", "roles_of"]
