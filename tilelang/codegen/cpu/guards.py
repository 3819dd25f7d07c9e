"""Which guards of a Parallel nest one test before the nest can replace.

The index of a guarded access, linear in the nest's variables, is smallest and largest at corners of the iteration
space; when both lie inside the buffer, no iteration needs the guard.

    for i in T.Parallel(128): B[bx * 128 + i] = A[bx * 128 + i]
      ->  if 0 <= bx * 128 and bx * 128 + 127 < N:  the nest without guards   else:  the nest with guards
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (
    AddressOf,
    Bind,
    Buffer,
    Call,
    Expr,
    For,
    Load,
    Node,
    Parallel,
    Stmt,
    Store,
    Var,
    binary,
    const,
    free_vars,
    substitute,
    walk,
)

from .state import Code


@dataclass
class GuardPlan:
    """accesses: (node id, dimension) that the test clears.  tests: (lowest index, highest index, size) of each."""

    accesses: set[tuple[int, int]] = field(default_factory=set)
    tests: dict[Any, tuple[Expr, Expr, Any]] = field(default_factory=dict)

    def condition(self, cx: Code) -> str:
        """i1: all accesses are in range, and the nest runs at least once in every dimension that matters."""
        f, ok = cx.f, "true"
        for low, high, size in self.tests.values():
            if not (isinstance(b := cx.analyzer.bounds_of(cx.analyzer.linear(low))[0], int) and b >= 0):
                ok = f.both(ok, f.let(f"icmp sge i64 {cx.index(low)}, 0"))
            ok = f.both(ok, f.less(cx.index(high), cx.index(size)))
        return str(ok)


def plan_guards(cx: Code, nest: Parallel) -> GuardPlan:
    """The guards of `nest` that a test on values known before it decides."""
    if not cx.guarded:
        return GuardPlan()
    known = _Nest(Analyzer(cx.analyzer.env))
    known.visit(nest)
    _drop_proven(cx, known.plan)
    return known.plan


@dataclass
class _Nest:
    """What is known of a nest's variables on the way through it.

    ranges: first and last value of a loop's variable.  inlined: values of bindings.  opaque: variables whose values the nest
    alone knows.
    """

    analyzer: Analyzer
    plan: GuardPlan = field(default_factory=GuardPlan)
    ranges: dict[Var, tuple[Expr, Expr]] = field(default_factory=dict)
    inlined: dict[Var, Expr] = field(default_factory=dict)
    opaque: set[Var] = field(default_factory=set)

    def visit(self, s: Any) -> None:
        if isinstance(s, Parallel):
            for v, e in zip(s.vars, s.extents):
                self.enter(v, const(0, v.dtype), substitute(e, self.inlined))
            self.visit(s.body)
        elif isinstance(s, For):
            self.look(s.start)
            self.look(s.extent)
            self.enter(s.var, substitute(s.start, self.inlined), substitute(s.extent, self.inlined))
            self.visit(s.body)
        elif isinstance(s, Bind):
            self.look(s.value)
            value = substitute(s.value, self.inlined)
            if s.var.dtype.is_signed and not _of_memory(value):
                self.inlined[s.var] = value
            else:
                self.opaque.add(s.var)
        elif isinstance(s, Stmt):
            if isinstance(s, Store):
                self.access(s, s.buffer, s.indices)
            for child in _fields(s):
                if isinstance(child, Stmt):
                    self.visit(child)
                elif isinstance(child, Expr):
                    self.look(child)

    def enter(self, v: Var, start: Expr, extent: Expr) -> None:
        if _of_memory(start) or _of_memory(extent):
            self.opaque.add(v)
        else:
            self.ranges[v] = (start, binary("sub", binary("add", start, extent), const(1, extent.dtype)))

    def look(self, e: Expr) -> None:
        for n in walk(e):
            if isinstance(n, (Load, AddressOf)):
                self.access(n, n.buffer, n.indices)

    def access(self, n: Node, b: Buffer, indices: tuple[Expr, ...]) -> None:
        if b.scope() != "global" or len(indices) != len(b.shape):
            return
        for d, (e, size) in enumerate(zip(indices, b.shape)):
            if e.dtype.lanes > 1 or not e.dtype.is_signed:
                continue
            corners = _corners(self.analyzer, substitute(e, self.inlined), self.ranges, self.opaque)
            if corners is not None:
                self.plan.accesses.add((id(n), d))
                key = (corners[0], corners[1], size)
                self.plan.tests.setdefault(key, key)


def _of_memory(e: Expr) -> bool:
    return any(isinstance(n, (Load, Call)) for n in walk(e))


def _drop_proven(cx: Code, plan: GuardPlan) -> None:
    """Tests that always hold need no run-time test (their accesses stay trusted)."""
    for key, (low, high, size) in list(plan.tests.items()):
        if isinstance(size, int) and cx.memory.proven(low, size) and cx.memory.proven(high, size):
            del plan.tests[key]


def _fields(s: Stmt) -> list[Any]:
    out: list[Any] = []
    for v in s._key():
        out.extend(v if isinstance(v, tuple) else (v,))
    return out


def _corners(a: Analyzer, e: Expr, ranges: dict[Var, tuple[Expr, Expr]],
             opaque: set[Var]) -> tuple[Expr, Expr] | None:
    """Least and greatest value of e over the nest as expressions of values known before it; None when not linear."""
    form = a.linear(e)
    low = high = e
    for t in form.terms:
        if isinstance(t, Var) and t in ranges:
            start, last = ranges[t]
            if any(x in ranges or x in opaque for x in free_vars(start) | free_vars(last)):
                return None  # a bound that moves with an outer loop of the nest
            c = form.terms[t]
            low = substitute(low, {t: start if c > 0 else last})
            high = substitute(high, {t: last if c > 0 else start})
        elif any(isinstance(n, (Load, Call)) or n in ranges or n in opaque for n in walk(t) if isinstance(
                n, (Load, Call, Var))):
            return None  # memory may change inside the nest, and other functions of the variables have no corners
    return low, high
