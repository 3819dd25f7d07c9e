"""What T.assume states about values that the host knows. The host checks it at every call, so proofs may use it."""

from __future__ import annotations

from collections.abc import Set

from tilelang.arith import Analyzer, bound_to, extent_bounds
from tilelang.ir import (Binary, Bind, Call, Const, Evaluate, Expr, For, Func, Launch, Load, Node, Parallel, Seq, Stmt, Var,
                         contains, free_vars, inner, unary, walk)

from .guards import conjuncts


def promises(func: Func) -> tuple[Expr, ...]:
    """Conditions of T.assume outside of control flow that mention only scalar parameters and shape symbols."""
    handles = {p for p, _ in func.buffers}
    known = {p for p in func.params if p not in handles and p.dtype.is_int}
    for _, b in func.buffers:
        known |= {v for d in (*b.shape, *(b.strides_ or ())) if isinstance(d, Expr) for v in free_vars(d)}
    out: list[Expr] = []

    def visit(s: Stmt) -> None:
        if isinstance(s, (Seq, Launch)):
            for x in inner(s):
                visit(x)
        elif isinstance(s, Evaluate) and s.call.op == "assume":
            out.extend(c if holds else unary("not", c) for c, holds in conjuncts(s.call.args[0]))

    visit(func.body)
    return tuple(e for e in out if free_vars(e) <= known and not contains(e, Load, Call))


def promised(func: Func) -> tuple[Analyzer, dict[Expr, int]]:
    """(an analyzer that knows the conditions, known divisors of variables for which `x % n == 0` is assumed)."""
    analyzer, divisors = Analyzer(), dict[Expr, int]()
    for e in promises(func):
        analyzer = analyzer.assuming(e)
        if isinstance(e, Binary) and e.op == "eq" and isinstance(e.b, Const) and e.b.value == 0:
            x = e.a
            if isinstance(x, Binary) and x.op in ("floormod", "truncmod") and isinstance(x.a, Var) and isinstance(x.b, Const):
                divisors[x.a] = max(divisors.get(x.a, 1), abs(int(x.b.value)))
    return analyzer, divisors


def with_ranges(known: Analyzer, n: Node, *kinds: type, but: Set[Var] = frozenset()) -> Analyzer:
    """The analyzer with the ranges of all variables that are defined in n, which have unique names.

    kinds: of the statements that define them, all if none are given: the range of a value takes time.  but: names left out.
    """
    for x in walk(n, *kinds or (Launch, For, Parallel, Bind)):
        match x:
            case Launch():
                known = bound_to(known, (*x.block_vars, *x.thread_vars), (*x.grid, *x.threads))
            case Parallel():
                known = bound_to(known, x.vars, x.extents)
            case For():
                known = known.bind(x.var, *extent_bounds(known, x.start, x.extent))
            case Bind() if x.var.dtype.is_int and x.var.dtype.lanes == 1 and x.var not in but:
                known = known.bind(x.var, *known.interval(x.value))
    return known
