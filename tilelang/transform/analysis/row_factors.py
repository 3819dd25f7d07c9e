"""Compute factors that all elements of a row share once per row, outside the loop over the elements.

    for i, j in Parallel(128, 128):                     for i in Parallel(128): f[i] = row[i] * s
        C[i, j] += P[i, j] * (row[i] * s)        ->     for i, j in Parallel(128, 128): C[i, j] += P[i, j] * f[i]

The loop that computes the factors can be moved to where it costs no time. The buffers that it reads can be reloaded right
after it. Only whole factors of a multiplication are moved. Additions and the multiplications they are fused with (FMA) stay
the same, so every element keeps its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang.arith import simplify_stmt
from tilelang.ir import (Bind, Binary, Buffer, Cast, Const, Expr, Load, Parallel, Select, Stmt, Store, Unary, Var, free_vars,
                         fresh, is_large, load, rebuild, replace, substitute, walk, with_options, FRAGMENT)

_MADE_OF = (Binary, Cast, Const, Load, Select, Unary, Var)


def row_factors(s: Stmt, known: Sequence[Buffer], pure: list[Bind]) -> tuple[Stmt, list[tuple[Buffer, Stmt]]]:
    """(the loop with its factors read from fragments, [(fragment, loop that fills it)]); (s, []) when it has none.

    known: the fragments that factors may read; a factor reads at least one. pure: bindings without loads that the loop may use.
    """
    if not isinstance(s, Parallel) or not isinstance(s.body, Store) or len(s.vars) < 2:
        return s, []
    inline: dict[Any, Any] = {}
    for b in pure:
        inline[b.var] = substitute(b.value, inline)
        if is_large(inline[b.var]):
            return s, []
    plain = simplify_stmt(substitute(s, inline))
    if not isinstance(plain, Parallel) or plain.vars != s.vars or not isinstance(plain.body, Store):
        return s, []
    finder = _Factors(plain, known)
    value = finder.visit(plain.body.value)
    if not finder.made:
        return s, []
    return replace(plain, body=replace(plain.body, value=value)), list(finder.made.values())


class _Factors:
    """made: expression -> (fragment, loop that fills it)."""

    def __init__(self, loop: Parallel, known: Sequence[Buffer]) -> None:
        self.loop, self.known = loop, known
        self.made: dict[Expr, tuple[Buffer, Stmt]] = {}

    def visit(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(self.visit, x))
        if not isinstance(x, Expr) or isinstance(x, Load):
            return x
        if isinstance(x, Binary) and x.op == "mul" and x.dtype.is_float:
            a, b = (self.taken(e) if (v := self.row(e)) is None else self.kept(e, v) for e in (x.a, x.b))
            return x if a is x.a and b is x.b else replace(x, a=a, b=b)
        return rebuild(x, self.visit)

    def taken(self, e: Expr) -> Expr:
        out: Expr = self.visit(e)
        return out

    def row(self, e: Expr) -> int | None:
        """The number of the only loop variable that a factor depends on; None for factors that are not moved."""
        nodes = list(walk(e))
        if not isinstance(e, Binary) or not e.dtype.is_float or e.dtype.lanes != 1 or any(
                not isinstance(x, _MADE_OF) and not isinstance(x, Buffer) for x in nodes):
            return None
        used = [n for n, v in enumerate(self.loop.vars) if v in free_vars(e)]
        loads = [x for x in nodes if isinstance(x, Load)]
        if len(used) != 1 or any(x.buffer not in self.known or x.indices != (self.loop.vars[used[0]],) for x in loads):
            return None
        return used[0] if loads else None

    def kept(self, e: Expr, n: int) -> Expr:
        v = self.loop.vars[n]
        if e not in self.made:
            name = f"{next(x.buffer.name for x in walk(e, Load))}_factor"
            b = Buffer(name, (self.loop.extents[n],), e.dtype, FRAGMENT, span=self.loop.span)
            i = fresh(v.name, v.dtype)
            fill = with_options(replace(self.loop, vars=(i,), extents=(self.loop.extents[n],),
                                      body=Store(b, (i,), substitute(e, {v: i}), span=e.span)), loop_layout=None)
            self.made[e] = b, fill
        return load(self.made[e][0], (v,))


__all__ = ["row_factors"]
