"""Which guards of a Parallel nest a test before the nest can replace.

The index of a guarded access, linear in the nest's variables, is smallest and largest at corners of the iteration
space; when both lie inside the buffer, no iteration needs the guard.

    for i in T.Parallel(128): B[bx * 128 + i] = A[bx * 128 + i]
      ->  if 0 <= bx * 128 and bx * 128 + 127 < N:  the nest without guards   else:  the nest with guards
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Bind, Buffer, Call, Expr, For, Load, Node, Parallel, Stmt, Store, Var, binary, const,
                         free_vars, is_large, substitute, walk, children, contains, GLOBAL)
from tilelang.ir.record import state
from tilelang.target.cpu_launch import RangeTest
from tilelang.target.cpu_ranges import is_in_range


@state
class NestGuards:
    """cleared: (id of an access, dimension) that the tests prove.  tests: what is compared before the nest."""

    cleared: set[tuple[int, int]] = field(default_factory=set)
    tests: dict[tuple[Expr, Expr, Any], None] = field(default_factory=dict)

    def range_tests(self, a: Analyzer) -> tuple[RangeTest, ...]:
        """The tests whose answer is not known already."""
        return tuple(RangeTest(low, high, size, not _is_natural(a, low)) for low, high, size in self.tests
                     if not (isinstance(size, int) and is_in_range(a, low, size) and is_in_range(a, high, size)))


def find_nest_guards(a: Analyzer, nest: Parallel) -> NestGuards:
    """The guards of a nest that a test of values known before it decides (see above)."""
    known = _Nest(Analyzer(a.env))
    known.visit(nest)
    return known.plan


def _is_natural(a: Analyzer, e: Expr) -> bool:
    low = a.bounds_of(a.linear(e))[0]
    return isinstance(low, int) and low >= 0


@state
class _Nest:
    """The known facts about the variables of a nest while it is visited.

    ranges: first and last value of a loop's variable.  inlined: values of bindings.  opaque: variables whose values are known
    inside the nest only.
    """

    analyzer: Analyzer
    plan: NestGuards = field(default_factory=NestGuards)
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
            if s.var.dtype.is_signed and not contains(value, Load, Call) and not is_large(value):
                self.inlined[s.var] = value
            else:
                self.opaque.add(s.var)
        elif isinstance(s, Stmt):
            if isinstance(s, Store):
                self.access(s, s.buffer, s.indices)
            for child in children(s):
                if isinstance(child, Stmt):
                    self.visit(child)
                elif isinstance(child, Expr):
                    self.look(child)

    def enter(self, v: Var, start: Expr, extent: Expr) -> None:
        if contains(start, Load, Call) or contains(extent, Load, Call):
            self.opaque.add(v)
        else:
            self.ranges[v] = (start, binary("sub", binary("add", start, extent), const(1, extent.dtype)))

    def look(self, e: Expr) -> None:
        for n in walk(e):
            if isinstance(n, (Load, AddressOf)):
                self.access(n, n.buffer, n.indices)

    def access(self, n: Node, b: Buffer, indices: tuple[Expr, ...]) -> None:
        if b.scope() != GLOBAL or len(indices) != len(b.shape):
            return
        for d, (e, size) in enumerate(zip(indices, b.shape)):
            if e.dtype.lanes > 1 or not e.dtype.is_signed:
                continue
            corners = _corners(self.analyzer, substitute(e, self.inlined), self.ranges, self.opaque)
            if corners is not None:
                self.plan.cleared.add((id(n), d))
                self.plan.tests[corners[0], corners[1], size] = None


def _corners(a: Analyzer, e: Expr, ranges: dict[Var, tuple[Expr, Expr]],
             opaque: set[Var]) -> tuple[Expr, Expr] | None:
    """Least and greatest value of e over the nest as expressions of values known before it; None when not linear."""
    form = a.linear(e)
    low = high = e
    for t in form.terms:
        if isinstance(t, Var) and t in ranges:
            start, last = ranges[t]
            if any(x in ranges or x in opaque for x in free_vars(start) | free_vars(last)):
                return None  # a bound that depends on an outer loop of the nest
            c = form.terms[t]
            low = substitute(low, {t: start if c > 0 else last})
            high = substitute(high, {t: last if c > 0 else start})
        elif any(isinstance(n, (Load, Call)) or n in ranges or n in opaque for n in walk(t) if isinstance(
                n, (Load, Call, Var))):
            return None  # memory may change inside the nest, and other functions of the variables have no corners
    return low, high
