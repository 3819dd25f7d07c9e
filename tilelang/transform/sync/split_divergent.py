"""Splits branches that only some threads take, so that all threads reach the barriers inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import (Alloc, Bind, Break, Buffer, Continue, Expr, For, If, Load, Seq, Stmt, Store, Var, While, const, fresh,
                         load, logical, replace, seq, substitute, unary, walk, VARIABLE)
from tilelang.ir.expr import Call

from ..analysis.divergence import Divergence
from ..analysis.statements import barrier
from .sync_tree import Place, Unplaceable


class Splitter:
    """Rewrites  if c: A; barrier; B  into  p = c; if p: A; barrier; if p: B.

    Uniform loops inside the branch are lifted out of it; values that A defines for B are kept in per-thread variables.
    """

    def __init__(self, divergence: Divergence) -> None:
        self.d = divergence

    def split(self, p: Place) -> list[Stmt]:
        """Statements that replace the divergent branch p, all in uniform control flow."""
        s = p.stmt
        assert isinstance(s, If)
        pred = fresh("taken", "bool")
        out: list[Stmt] = [Bind(pred, s.cond, span=s.span)]
        out += self.under(p.inner[0], pred, p)
        if s.orelse is not None:
            out += self.under(p.inner[1], unary("not", pred), p)
        return out

    def under(self, p: Place, pred: Expr, branch: Place) -> list[Stmt]:
        """Statements of p, each executed where pred holds, with p's barriers outside of any condition."""
        places = p.inner if isinstance(p.stmt, Seq) else [p]
        out: list[Stmt] = []
        run: list[Stmt] = []
        if isinstance(p.stmt, Seq) and p.before:
            out.append(barrier(p.stmt))

        def close() -> None:
            if run:
                out.append(If(pred, seq(*run), span=run[0].span))
                run.clear()

        for x in places:
            s = x.stmt
            if x.before:
                close()
                out.append(barrier(s))
            if isinstance(s, Alloc):
                out.append(s if s.init is None else replace(s, init=None))
                if s.init is not None:
                    run.append(Store(s.buffer, (const(0),), s.init, span=s.span))
            elif isinstance(s, Bind) and _pure(s.value):
                close()
                out.append(s)
            elif isinstance(s, Bind):
                kept = Buffer(s.var.name, (1,), s.var.dtype, VARIABLE, span=s.span)
                out.append(Alloc(kept, span=s.span))
                run.append(Store(kept, (const(0),), s.value, span=s.span))
                self.forward(places, x, s.var, load(kept, (0,)))
            elif not x.has_barrier:
                run.append(s)
            elif isinstance(s, Seq):
                close()
                out += self.under(x, pred, branch)
            elif isinstance(s, If):
                close()
                inner = fresh("taken", "bool")
                out.append(Bind(inner, logical("and", pred, s.cond), span=s.span))
                out += self.under(x.inner[0], inner, branch)
                if s.orelse is not None:
                    other = fresh("taken", "bool")  # uses the stored condition: the first branch may change what s.cond reads
                    out.append(Bind(other, logical("and", pred, unary("not", inner)), span=s.span))
                    out += self.under(x.inner[1], other, branch)
            elif isinstance(s, For) and self.same(s.start) and self.same(s.extent):
                self.check_loop(x)
                if any(isinstance(y.stmt, (Break, Continue)) for y in x.all()):
                    raise Unplaceable(branch)
                close()
                out.append(replace(s, body=seq(*self.under(x.inner[0], pred, branch))))
            else:
                raise Unplaceable(branch)
        close()
        return out

    def same(self, e: Expr) -> bool:
        """Whether threads outside the branch can compute a loop's bound too.

        That holds for pure values, and for variables that are equal in all threads.
        """
        return _pure(e, lambda x: x.buffer.scope_name == VARIABLE) and not self.d.divergent(e)

    def check_loop(self, p: Place) -> None:
        """Raises Unplaceable when threads may run a loop with a barrier a different number of times."""
        s = p.stmt
        if isinstance(s, For):
            odd = self.d.divergent(s.start) or self.d.divergent(s.extent)
        elif isinstance(s, While):
            odd = self.d.divergent(s.cond)
        else:
            odd = True
        if odd or self.d.leaves_early(s.body, False):  # type: ignore[attr-defined]
            raise Unplaceable(p)

    def forward(self, places: list[Place], at: Place, var: Var, value: Expr) -> None:
        """Make later statements read value instead of var."""
        for x in places[places.index(at) + 1:]:
            for y in x.all():
                y.stmt = substitute(y.stmt, {var: value})


def _pure(e: Any, allowed: Callable[[Load], bool] = lambda _: False) -> bool:
    """Whether a value can be computed by threads that did not compute it originally.  allowed: which loads are permitted."""
    for x in walk(e):
        if isinstance(x, Call) or isinstance(x, Load) and not allowed(x):
            return False
        if getattr(x, "op", None) in ("floordiv", "floormod", "truncdiv", "truncmod"):
            if not (hasattr(x.b, "value") and x.b.value):  # type: ignore[attr-defined]
                return False
    return True
