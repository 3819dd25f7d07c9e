"""Which values may differ between the threads of a block, and which code only some of them reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Break, Buffer, Call, Continue, Evaluate, Expr, For, If, Launch, Load,
                         Parallel, Seq, Stmt, Store, TileOp, Var, While, children, contains, controls, inner, walk, FRAGMENT,
                         GLOBAL)
from tilelang.target.intrinsics import INTRINSICS, PURE
from tilelang.target.thread_calls import BLOCK_VOTES

from .effects import argument_mode, written_globals


class Divergence:
    """Divergent variables and per-thread arrays of a launch, by fixpoint from "all uniform"."""

    def __init__(self, launch: Launch) -> None:
        self.vars: set[Var] = {v for v, n in zip(launch.thread_vars, launch.threads) if n > 1}
        self.locals: set[Var] = set()
        self.memo: dict[int, tuple[Expr, bool]] = {}
        # Other blocks may change global memory that this kernel writes between the reads of two threads.
        self.launch = launch  # keeps the loads alive whose ids are in `settled`
        self.unstable = written_globals(launch.body)
        self.settled = _settled(launch.body) if self.unstable else frozenset()
        while True:
            before = len(self.vars), len(self.locals)
            self.memo.clear()
            self.stmt(launch.body, False)
            if before == (len(self.vars), len(self.locals)):
                return

    def divergent(self, e: Expr) -> bool:
        """Whether the threads of a block may compute different values for e."""
        hit = self.memo.get(id(e))
        if hit is None:
            hit = self.memo[id(e)] = (e, self._expr(e))
        return hit[1]

    def _expr(self, e: Expr) -> bool:
        if isinstance(e, Var):
            return e in self.vars
        if isinstance(e, Load):
            if e.buffer.data in self.locals:
                return True
            if e.buffer.data in self.unstable:
                return id(e) not in self.settled or any(map(self.divergent, e.indices))
            return any(map(self.divergent, e.indices))
        if isinstance(e, Call):
            if e.op in BLOCK_VOTES:
                return False
            row = INTRINSICS.get(e.op)
            if row is None or row.effect != PURE or e.op.startswith("get_") or e.op == "in_warp_groups":
                return True
        return any(self.divergent(c) for c in children(e) if isinstance(c, Expr))

    def holds_divergent(self, b: Buffer) -> bool:
        """Whether the threads of a block may read different values from one element of a buffer."""
        return b.data in self.locals or b.data in self.unstable

    def stmt(self, s: Stmt, some: bool) -> None:
        """Follow a statement. some: only some threads may get here."""
        match s:
            case Bind():
                if self.divergent(s.value):
                    self.vars.add(s.var)
                self.addresses(s.value)
            case Alloc():
                if s.init is not None and self.divergent(s.init):
                    self.locals.add(s.buffer.data)
            case Store():
                if s.buffer.scope_name.startswith("local") and (
                        some or self.divergent(s.value) or any(map(self.divergent, s.indices))):
                    self.locals.add(s.buffer.data)
                self.addresses(s.value)
            case Evaluate():
                self.addresses(s.call)
            case Seq() | If() | For() | While() | Launch():
                if isinstance(s, For) and any(map(self.divergent, controls(s))):
                    self.vars.add(s.var)
                some = some or self.uneven(s)
                for x in inner(s):
                    self.stmt(x, some)
            case Parallel():
                self.vars.update(s.vars)
                self.stmt(s.body, True)
            case TileOp():
                own = s.accesses()  # type: ignore[attr-defined]
                differs = some or any(self.divergent(e) for e in walk(s, Expr)) or any(
                    a.reads and self.holds_divergent(a.region.buffer) for a in own)
                for b in (a.region.buffer for a in own if a.writes):
                    if b.scope_name == FRAGMENT or differs and b.scope_name.startswith("local"):
                        self.locals.add(b.data)

    def addresses(self, e: Expr) -> None:
        """Per-thread arrays written through an address hold divergent values; shared memory has one value for all threads."""
        for c in walk(e, Call):
            for k, a in enumerate(c.args):
                if (isinstance(a, AddressOf) and a.buffer.scope_name.startswith("local")
                        and argument_mode(c, k) != "read"):
                    self.locals.add(a.buffer.data)

    def left_one_by_one(self, s: While) -> bool:
        """Whether threads may run a different number of iterations of a while loop."""
        leaves = [x.cond for x in walk(s.body, If) if contains(x, Break)]
        return any(map(self.divergent, (s.cond, *leaves)))

    def uneven(self, s: Stmt) -> bool:
        """Whether threads may take different ways of a branch, or run a loop or a part of it a different number of times."""
        return any(map(self.divergent, controls(s))) or isinstance(s, (For, While)) and self.leaves_early(s.body)

    def leaves_early(self, s: Stmt, some: bool = False) -> bool:
        """Whether some threads may leave the loop around s, or its iteration, before the others."""
        return next(parted(s, self.divergent, some), None) is not None


def parted(s: Stmt, differs: Callable[[Any], bool], some: bool = False, loops: bool = False) -> Iterator[Stmt]:
    """The breaks and continues of the loop around s, and the returns, that only some threads reach.

    differs: whether a condition, or bounds, differ between threads.  some: only some threads reach s.  loops: also returns in
    loops inside.
    """
    if isinstance(s, (Break, Continue)) or isinstance(s, Evaluate) and s.call.op == "thread_return":
        yield from (s,) if some else ()
    elif isinstance(s, (Seq, If)):
        some = some or isinstance(s, If) and differs(s.cond)
        for x in inner(s):
            yield from parted(x, differs, some, loops)
    elif loops and isinstance(s, (For, While)):
        uneven = any(map(differs, controls(s))) or any(not isinstance(x, Evaluate) for x in parted(s.body, differs))
        yield from (x for x in parted(s.body, differs, some or uneven, True) if isinstance(x, Evaluate))


def _settled(body: Stmt) -> frozenset[int]:
    """ids of the loads of global memory that no block writes between the surrounding grid barriers: all threads read the same
    value there, whatever wrote it. Only grid barriers outside loops and branches count."""
    phases: list[list[Stmt]] = [[]]
    for s in _flat(body):
        if isinstance(s, Evaluate) and s.call.op == "sync_grid":
            phases.append([])
        else:
            phases[-1].append(s)
    if len(phases) == 1:
        return frozenset()
    still: set[int] = set()
    moving: set[int] = set()
    for phase in phases:
        changed = set().union(*map(written_globals, phase))
        for s in phase:
            for x in walk(s):
                if isinstance(x, Load) and x.buffer.scope_name == GLOBAL:
                    (moving if x.buffer.data in changed else still).add(id(x))
    return frozenset(still - moving)


def _flat(s: Stmt) -> list[Stmt]:
    return [y for x in s.stmts for y in _flat(x)] if isinstance(s, Seq) else [s]
