"""Simplifies whole statements, using the ranges of the loops, launches, bindings and conditions around each expression.

    for i in serial(0, 8):            for i in serial(0, 8):
        if i < 8:                 ->      B[i] = A[i]
            B[i // 1] = A[i % 8]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang.ir import (EMPTY, AddressOf, Binary, Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For, If, Launch,
                         Load, Parallel, Region, Seq, Stmt, Store, TileOp, Var, While, const, contains, rebuild, remember, seq,
                         substitute, walk, PRIVATE)

from . import bounds as ba
from .analyzer import Analyzer, Env
from .linear import Bounds


def simplify_stmt(stmt: Stmt, env: Env | None = None) -> Stmt:
    """Simplify every expression of a statement under the bounds of the loops, launches and conditions around it.

    Branches that are never taken and loops of extent 0 are removed.  A serial loop of extent 1 is replaced by its body, unless
    its plan has `kept`.  Returns the same object when nothing changes.  env: inclusive bounds of free variables.
    """
    return _Simplify().stmt(stmt, Analyzer(env))


def extent_bounds(a: Analyzer, start: Any, extent: Any) -> Bounds:
    """Bounds of a variable that runs over [start, start + extent)."""
    lo, _ = a.interval(_expr(start))
    _, hi = ba.add(a.interval(_expr(start)), a.interval(_expr(extent)))
    hi = None if hi is None else hi - 1
    if lo is not None and hi is not None and hi < lo:
        hi = lo  # the loop has no iterations: any non-empty interval is correct for its body
    return lo, hi


def bound_to(a: Analyzer, names: Sequence[Var], extents: Sequence[Any]) -> Analyzer:
    """The analyzer with variables that run from 0 to below their extents."""
    for v, n in zip(names, extents):
        a = a.bind(v, *extent_bounds(a, 0, n))
    return a


def _expr(v: Any) -> Expr:
    return v if isinstance(v, Expr) else const(v)


class _Simplify:
    """One walk over a statement.  The analyzer is passed down, because more is known in a branch than after it."""

    def __init__(self) -> None:
        self.values: dict[Var, Expr] = {}  # values of bound integers that contain no loads and no calls

    def stmt(self, s: Any, a: Analyzer) -> Any:
        if isinstance(s, Seq):
            return self._seq(s, a)
        if isinstance(s, For):
            return self._for(s, a)
        if isinstance(s, If):
            return self._if(s, a)
        if isinstance(s, Launch):
            a = bound_to(a, (*s.block_vars, *s.thread_vars), (*s.grid, *s.threads))
        elif isinstance(s, Parallel):
            a = bound_to(a, s.vars, s.extents)
        return rebuild(s, lambda v: self._field(v, a))

    def _field(self, v: Any, a: Analyzer) -> Any:
        if isinstance(v, Stmt):
            return self.stmt(v, a)
        if isinstance(v, (Var, Buffer)):
            return v
        if isinstance(v, Expr):
            return a.simplify(v)
        if isinstance(v, tuple):
            out = tuple(self._field(x, a) for x in v)
            return v if all(p is q for p, q in zip(out, v)) else out
        if isinstance(v, Region):
            return rebuild(v, lambda x: self._field(x, a))
        return v

    def _seq(self, s: Seq, a: Analyzer) -> Stmt:
        out: list[Stmt] = []
        changed = False
        for x in s.stmts:
            y = self.stmt(x, a)
            changed |= y is not x
            if isinstance(y, Bind) and y.value.dtype.is_int and y.value.dtype.lanes == 1:
                a = a.bind(y.var, *a.interval(y.value))
                if all(isinstance(n, (Var, Const, Binary)) for n in walk(y.value)):
                    remember(self.values, y)
            out.append(y)
        return seq(*out, span=s.span) if changed else s

    def _for(self, s: For, a: Analyzer) -> Stmt:
        start, extent = a.simplify(s.start), a.simplify(s.extent)
        n = a.interval(extent)
        if n[1] is not None and n[1] <= 0:
            return EMPTY
        if n == (1, 1) and s.kind in ("serial", "unroll") and not s.plan.kept:
            if not _has_break(s.body):
                return self.stmt(substitute(s.body, {s.var: start}), a)
        inner = a.bind(s.var, *extent_bounds(a, start, extent))
        body = self.stmt(s.body, inner)
        if start is s.start and extent is s.extent and body is s.body:
            return s
        return For(s.var, start, extent, s.kind, body, s.attrs, s.plan, span=s.span)

    def _if(self, s: If, a: Analyzer) -> Stmt:
        cond = a.simplify(s.cond)
        if not isinstance(cond, Const):  # substituting the values of bound integers may decide the condition
            decided = a.simplify(substitute(cond, self.values))
            cond = decided if isinstance(decided, Const) else cond
        if isinstance(cond, Const):
            taken = s.then if cond.value else s.orelse
            return EMPTY if taken is None else self.stmt(taken, a)
        then = self.stmt(s.then, _knowing(a, cond, True, s.then))
        orelse = None if s.orelse is None else self.stmt(s.orelse, _knowing(a, cond, False, s.orelse))
        if cond is s.cond and then is s.then and orelse is s.orelse:
            return s
        return If(cond, then, orelse, span=s.span)


def _knowing(a: Analyzer, cond: Expr, holds: bool, branch: Stmt) -> Analyzer:
    """The analyzer for a branch: it knows those operands of the condition that stay valid throughout the branch."""
    if _lasts(cond, branch):
        return a.assuming(cond, holds)
    if isinstance(cond, Binary) and cond.op == ("and" if holds else "or"):
        return _knowing(_knowing(a, cond.a, holds, branch), cond.b, holds, branch)
    return a


def _lasts(cond: Expr, branch: Stmt) -> bool:
    """Whether a condition stays valid throughout its branch: the branch does not write memory that the condition reads.

    Memory that other threads may write is assumed to change wherever the branch waits, contains a while loop or makes a call.
    """
    read = [n.buffer for n in walk(cond, Load)]
    if contains(cond, Call):
        return False
    if not read:
        return True
    shared = any(b.scope_name not in PRIVATE for b in read)
    data = {b.data for b in read}
    for n in walk(branch):
        if isinstance(n, (Store, AddressOf)) and n.buffer.data in data or shared and isinstance(n, (Evaluate, While)):
            return False
        if isinstance(n, TileOp) and any(x.writes and x.region.buffer.data in data for x in n.accesses()):  # type: ignore[attr-defined]
            return False
    return True


def _has_break(s: Stmt | None) -> bool:
    """Whether s contains a break or continue of the loop around it (those of nested loops do not count)."""
    if isinstance(s, If):
        return _has_break(s.then) or _has_break(s.orelse)
    return isinstance(s, (Break, Continue)) or isinstance(s, Seq) and any(map(_has_break, s.stmts))
