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


@dataclass
class GuardPlan:
    """accesses: (node id, dimension) that the test clears.  tests: (lowest index, highest index, size) of each."""

    accesses: set[tuple[int, int]] = field(default_factory=set)
    tests: dict[Any, tuple[Expr, Expr, Any]] = field(default_factory=dict)

    def condition(self, cx: Any) -> str:
        """i1: all accesses are in range, and the nest runs at least once in every dimension that matters."""
        f, ok = cx.f, "true"
        for low, high, size in self.tests.values():
            if not (isinstance(b := cx.analyzer.bounds_of(cx.analyzer.linear(low))[0], int) and b >= 0):
                ok = f.both(ok, f.let(f"icmp sge i64 {cx.index(low)}, 0"))
            ok = f.both(ok, f.less(cx.index(high), cx.index(size)))
        return str(ok)


def plan_guards(cx: Any, nest: Parallel) -> GuardPlan:
    """The guards of `nest` that a test on values known before it decides."""
    plan = GuardPlan()
    if not cx.guarded:
        return plan
    ranges: dict[Var, tuple[Expr, Expr]] = {}
    inlined: dict[Var, Expr] = {}
    outer = cx.analyzer
    inner = Analyzer(outer.env)

    def enter(v: Var, start: Expr, extent: Expr) -> None:
        if any(isinstance(n, (Load, Call)) for e in (start, extent) for n in walk(e)):
            opaque.add(v)
            return
        last = binary("sub", binary("add", start, extent), const(1, extent.dtype))
        ranges[v] = (start, last)

    def visit(s: Any) -> None:
        if isinstance(s, Parallel):
            for v, e in zip(s.vars, s.extents):
                enter(v, const(0, v.dtype), substitute(e, inlined))
            visit(s.body)
        elif isinstance(s, For):
            look(s.start)
            look(s.extent)
            enter(s.var, substitute(s.start, inlined), substitute(s.extent, inlined))
            visit(s.body)
        elif isinstance(s, Bind):
            look(s.value)
            value = substitute(s.value, inlined)
            if s.var.dtype.is_signed and not any(isinstance(n, (Load, Call)) for n in walk(value)):
                inlined[s.var] = value
            else:
                opaque.add(s.var)
        elif isinstance(s, Stmt):
            look_here(s)

    opaque: set[Var] = set()

    def look_here(s: Stmt) -> None:
        if isinstance(s, Store):
            access(s, s.buffer, s.indices)
        for child in _fields(s):
            if isinstance(child, Stmt):
                visit(child)
            elif isinstance(child, Expr):
                look(child)

    def look(e: Expr) -> None:
        for n in walk(e):
            if isinstance(n, (Load, AddressOf)):
                access(n, n.buffer, n.indices)

    def access(n: Node, b: Buffer, indices: tuple[Expr, ...]) -> None:
        if b.scope() != "global" or len(indices) != len(b.shape):
            return
        for d, (e, size) in enumerate(zip(indices, b.shape)):
            if e.dtype.lanes > 1 or not e.dtype.is_signed:
                continue
            corners = _corners(inner, substitute(e, inlined), ranges, opaque)
            if corners is not None:
                plan.accesses.add((id(n), d))
                key = (corners[0], corners[1], size)
                plan.tests.setdefault(key, key)

    visit(nest)
    _drop_proven(cx, plan)
    return plan


def _drop_proven(cx: Any, plan: GuardPlan) -> None:
    """Tests that always hold need no run-time test (their accesses stay trusted)."""
    for key, (low, high, size) in list(plan.tests.items()):
        if isinstance(size, int) and cx.proven(low, size) and cx.proven(high, size):
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
