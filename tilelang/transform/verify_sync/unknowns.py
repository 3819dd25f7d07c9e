"""What a run assumes about numbers that are known only at run time, in programs without mbarriers and warp roles."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Call, Const, Continue, Evaluate, Expr, For, If, Launch, Load,
                         Seq, Stmt, Store, Var, While, children, free_vars, walk, GLOBAL)
from tilelang.ir.record import record
from tilelang.target.intrinsics import INTRINSICS, PURE

from ..analysis.effects import argument_mode, written_globals


SAMPLES = (0, 1, 3, 6)  # assumed for unknown numbers that are equal in all threads: one run each where a condition uses one
MOST = 160  # most combinations of parameter values that are followed


class Unknowns:
    """The assumptions of one run.

    trial: which of SAMPLES unknown numbers have in conditions that are equal in all threads; such a condition without numbers
    holds in the first run and fails in the others.  sampled: whether a condition was.  extent: iterations of loops of unknown
    length, None: as many as show all slots of a ring.

    given: parameters that threads compare with their numbers for equality (`i == n`): a number, or None for one that equals
    no thread's number.  asked: the numbers that were compared with parameters that `given` does not name.
    """

    def __init__(self, launch: Launch, uniform: Uniform, extent: int | None, trial: int, given: dict[Var, int | None]) -> None:
        self.launch, self.uniform, self.extent, self.trial, self.given = launch, uniform, extent, trial, given
        self.sampled = self._guessing = False
        self.asked: dict[Var, set[int]] = {}
        self._outer: set[Var] | None = None
        self._names: dict[Var, Expr] = {}

    def truth(self, e: Expr, st: Any) -> Any:
        """The value of an unknown condition in the frame of a stream: that of this trial, if the threads have it in common."""
        self._guessing = True
        c = st.values(e, st)
        self._guessing = False
        alike = not self.uniform.differs(e)
        self.sampled |= alike or c is not None
        return self.trial == 0 if alike and (self.trial < 2 or c is None) else c

    def number(self, e: Load) -> int | None:
        """The number that an unknown one in memory is taken to be; None outside of `truth`."""
        return SAMPLES[self.trial] if self._guessing and not self.uniform.differs(e) else None

    def others(self) -> Iterator[dict[Var, int | None]]:
        """Every combination of the numbers asked for and None; nothing where there are too many, or nothing was asked."""
        if self.asked and prod(len(x) + 1 for x in self.asked.values()) <= MOST:
            for way in product(*([*sorted(x), None] for x in self.asked.values())):
                yield dict(zip(self.asked, way))

    def compared(self, e: Binary, a: Any, b: Any, known: Container[Var]) -> Any:
        """Value per thread of an "eq" or "ne" with one known side (a or b), None when unknown.

        known: names whose value the walk knows.
        """
        side, mine = (e.a, b) if a is None else (e.b, a)
        found = None if mine is None or not np.ndim(mine) else self._parameter(side, known)
        if found is None:
            return None
        var, more = found
        if var not in self.given:
            asked = self.asked.setdefault(var, set())
            if len(asked) <= MOST:
                asked.update((mine - more).tolist())
            return None
        answer = self.given[var]
        return (np.zeros(len(mine), bool) if answer is None else mine == answer + more) == (e.op == "eq")

    def _parameter(self, e: Expr, known: Container[Var]) -> tuple[Var, int] | None:
        """(parameter, constant) whose sum e is; None for other expressions."""
        if isinstance(e, Var):
            if self._outer is None:
                self._outer = free_vars(self.launch)
                self._names = {x.var: x.value for x in walk(self.launch.body, Bind)}
            if e in self._names:
                return self._parameter(self._names[e], known)
            return (e, 0) if e in self._outer and e not in known and not e.dtype.is_float else None
        if isinstance(e, Binary) and e.op in ("add", "sub") and isinstance(e.b, Const):
            found = self._parameter(e.a, known)
            return None if found is None else (found[0], found[1] + (e.b.value if e.op == "add" else -e.b.value))
        return None


# ---- values that threads share ----------------------------------------------------------------------------------------------
# Independently of the analysis that places synchronisation.  The program is translated once to equations: a name, or an array
# of each thread, gets values under conditions.  A value that depends on a thread's number, directly or through other
# equations, may differ between threads.


VOTES = ("syncthreads_count", "syncthreads_and", "syncthreads_or")  # of the whole block: one result for all


@record
class Equation:
    """values: what the target gets, with the indices of an array.  under: conditions that decide whether it gets them."""

    target: Var
    values: tuple[Expr, ...]
    under: tuple[Expr, ...] = ()


class Uniform:
    """Which values the threads of a launch have in common.

    differing: names and arrays whose values may differ between threads.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch  # keeps alive the loads that are identified by id
        self.differing: set[Var] = {v for v, n in zip(launch.thread_vars, launch.threads) if n > 1}
        self.equations: list[Equation] = []
        self.written = written_globals(launch.body)  # another block may write it between the reads of two threads
        self.steady = _steady_loads(launch.body) if self.written else frozenset()
        self.known: dict[int, tuple[Expr, bool]] = {}
        self._read(launch.body, ())
        self._solve()

    def differs(self, e: Expr) -> bool:
        """Whether two threads of a block may compute different values for e."""
        hit = self.known.get(id(e))
        if hit is None:
            hit = self.known[id(e)] = (e, self._looked_at(e))
        return hit[1]

    def _looked_at(self, e: Expr) -> bool:
        if isinstance(e, Var):
            return e in self.differing
        if isinstance(e, Load):
            storage = e.buffer.data
            if storage in self.differing or storage in self.written and id(e) not in self.steady:
                return True
        if isinstance(e, Call):
            if e.op in VOTES:
                return False
            row = INTRINSICS.get(e.op)
            if row is None or row.effect != PURE or e.op.startswith("get_") or e.op == "in_warp_groups":
                return True
        return any(self.differs(c) for c in children(e) if isinstance(c, Expr))

    def _solve(self) -> None:
        """Propagate differences along the equations until nothing changes."""
        open_ = self.equations
        while True:
            self.known.clear()
            spread = [q for q in open_ if any(map(self.differs, q.values)) or any(map(self.differs, q.under))]
            if not spread:
                return
            self.differing.update(q.target for q in spread)
            open_ = [q for q in open_ if q.target not in self.differing]

    def _read(self, s: Stmt, under: tuple[Expr, ...]) -> None:
        match s:
            case Seq():
                for x in s.stmts:
                    self._read(x, under)
            case Bind():
                self.equations.append(Equation(s.var, (s.value,)))
                self._written_through(s.value)
            case Alloc():
                if s.init is not None:
                    self.equations.append(Equation(s.buffer.data, (s.init,)))
            case Store():
                if s.buffer.scope_name.startswith("local"):
                    self.equations.append(Equation(s.buffer.data, (s.value, *s.indices), under))
                self._written_through(s.value)
            case Evaluate():
                self._written_through(s.call)
            case For():
                self.equations.append(Equation(s.var, (s.start, s.extent)))
                self._read(s.body, (*under, s.start, s.extent, *_exits(s.body)))
            case While():
                self._read(s.body, (*under, s.cond, *_exits(s.body)))
            case If():
                for body in (s.then, s.orelse):
                    if body is not None:
                        self._read(body, (*under, s.cond))

    def _written_through(self, e: Expr) -> None:
        """Handle an instruction that writes at an address in a per-thread array: each thread gets its own value."""
        for c in walk(e, Call):
            self.differing.update(a.buffer.data for k, a in enumerate(c.args) if isinstance(a, AddressOf)
                                  and a.buffer.scope_name.startswith("local") and argument_mode(c, k) != "read")


def _exits(body: Stmt, under: tuple[Expr, ...] = ()) -> Iterator[Expr]:
    """Conditions under which a thread leaves the loop of this body, or its iteration."""
    match body:
        case Break() | Continue():
            yield from under
        case Evaluate():
            if body.call.op == "thread_return":
                yield from under
        case Seq():
            for x in body.stmts:
                yield from _exits(x, under)
        case If():
            for branch in (body.then, body.orelse):
                if branch is not None:
                    yield from _exits(branch, (*under, body.cond))


def _steady_loads(body: Stmt) -> frozenset[int]:
    """ids of the loads of global memory that no block writes between the two grid barriers around them."""
    phase: list[Stmt] = []
    phases = [phase]
    waiting = [body]
    while waiting:
        s = waiting.pop()
        if isinstance(s, Seq):
            waiting += reversed(s.stmts)
        elif isinstance(s, Evaluate) and s.call.op == "sync_grid":
            phases.append(phase := [])
        else:
            phase.append(s)
    if len(phases) == 1:
        return frozenset()
    steady: set[int] = set()
    changing: set[int] = set()
    for stmts in phases:
        written = set().union(*map(written_globals, stmts))
        for load in (x for s in stmts for x in walk(s, Load) if x.buffer.scope_name == GLOBAL):
            (changing if load.buffer.data in written else steady).add(id(load))
    return frozenset(steady - changing)
