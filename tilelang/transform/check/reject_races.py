"""Reject T.Parallel loops in which two iterations certainly store different values to one element.

    for i, j in T.Parallel(32, 8):
        B[i] = j                        # rejected: it is not defined which of the eight values is kept

Iterations run in no order on a GPU but in order on the CPU, where the loop would seem to work. Values read from memory may
be equal; check_races.py warns about them where asked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilelang.arith import simplify
from tilelang.errors import TileLangError, error, register
from tilelang.ir import (Bind, Break, Call, Const, Continue, Expr, For, Func, If, Load, Parallel, Store, Var, While,
                         const, convert, free_vars, contains, inner, is_const, remember, statements, substitute, DYNAMIC,
                         GLOBAL, STATIC)
from tilelang.ir.evaluate import evaluate

from ..analysis.disjoint import steps
from ..analysis.loop_body import drop_continue
from ..framework.pass_ import TILE, PassContext, pass_

register("parallel-overwrite", ValueError, "two T.Parallel iterations store different values in one element",
         "iterations run in no order: store in one of them under a condition, or use a serial loop",
         expected="one iteration that stores in an element")

POINTS = 1 << 18  # loops of more iterations are skipped
_OF_ALL = (GLOBAL, STATIC, DYNAMIC)


@pass_(needs=TILE)
def reject_races(func: Func, cx: PassContext) -> Func:
    """Raise "parallel-overwrite" for a store to global or shared memory that two iterations reach with different values.

    Changes nothing. Covers loops of constant extents. Stores whose index, condition or value depends on memory or on an
    argument are skipped.
    """
    for s in statements(func.body):
        if isinstance(s, Parallel):
            extents = [int(e.value) for e in s.extents if is_const(e)]  # type: ignore[attr-defined]
            if len(extents) == len(s.extents) and 1 < math.prod(extents) <= POINTS:
                _Loop(s, extents).follow(drop_continue(s.body), (), {})
    return func


class _Loop:
    """One parallel loop. Its iterations are enumerated only when a store is found that several of them may reach."""

    def __init__(self, loop: Parallel, extents: list[int]) -> None:
        self.loop = loop
        self.extents = dict(zip(loop.vars, extents))
        self.moving = {v for v, n in self.extents.items() if n > 1}
        self.points: dict[Var, np.ndarray] = {}

    def follow(self, s: Any, conds: tuple[tuple[Expr, bool], ...], bound: dict[Var, Expr]) -> None:
        """Check the stores below s. conds: enclosing conditions with their values. bound: names and their values."""
        match s:
            case Bind():
                remember(bound, s)
            case Store():
                if s.buffer.scope_name in _OF_ALL:
                    self.check(s, conds, bound)
            case If():
                cond = substitute(s.cond, bound)
                self.follow(s.then, (*conds, (cond, True)), dict(bound))
                if s.orelse is not None:
                    self.follow(s.orelse, (*conds, (cond, False)), dict(bound))
            case For() if not (isinstance(s.extent, Const) and s.extent.value > 0) or contains(s.body, Break, Continue):
                return  # the rest may not run, or only in part
            case While():
                return
            case _:
                for x in inner(s):
                    self.follow(x, conds, bound)

    def check(self, s: Store, conds: tuple[tuple[Expr, bool], ...], bound: dict[Var, Expr]) -> None:
        """Raise parallel-overwrite where two iterations reach s with different values."""
        value = substitute(s.value, bound)
        indices = tuple(substitute(i, bound) for i in s.indices)
        if not self.plain(value) or self.disjoint(indices) or any(i.dtype.lanes > 1 for i in indices):
            return
        got = self.values(value)
        live = self.live(conds)
        at = [self.values(i, True) for i in indices]
        if got is None or live is None or not live.any() or any(a is None for a in at):
            return
        which = np.flatnonzero(live)
        _, place = np.unique(np.stack([a[live] for a in at if a is not None]), axis=1, return_inverse=True)
        place = place.reshape(-1)
        first = np.zeros(place.max() + 1, np.int64)
        first[place[::-1]] = which[::-1]
        a, b = got[which], got[first[place]]
        for k in np.flatnonzero((a != b) & ~((a != a) & (b != b)))[:4].tolist():
            pair = int(first[place[k]]), int(which[k])
            if all(self.same(i, *pair) for i in indices):
                one, two = (", ".join(f"{v.name}={int(p[n])}" for v, p in self.points.items()) for n in pair)
                raise error("parallel-overwrite", f"iterations ({one}) and ({two}) of the parallel loop store different values "
                            f"in one element of `{s.buffer.name}`",
                            found=f"({one}) and ({two})", span=s.span or self.loop.span)

    def plain(self, value: Expr) -> bool:
        """Whether a value consists of the loop's variables and constants alone."""
        return free_vars(value) <= set(self.extents) and not contains(value, Load, Call)

    def disjoint(self, indices: tuple[Expr, ...]) -> bool:
        """Whether the indices prove that no two iterations reach one element: each variable stands alone in some index."""
        alone: set[Var] = set()
        for i in indices:
            mine = free_vars(i) & self.moving
            if len(mine) == 1 and steps(i, next(iter(mine))):
                alone |= mine
        return alone == self.moving

    def values(self, e: Expr, others: bool = False) -> np.ndarray | None:
        """The value of e in each iteration; None if it cannot be computed. others: variables from outside the loop are 0."""
        if contains(e, Load, Call):
            return None
        if not self.points:
            axes = np.indices(tuple(self.extents.values())).reshape(len(self.extents), -1)
            self.points = dict(zip(self.extents, axes))
        more = free_vars(e) - set(self.points)
        if more and not others:
            return None
        count = next(iter(self.points.values())).shape
        try:
            return np.broadcast_to(np.asarray(evaluate(e, {**{v: 0 for v in more}, **self.points})), count)
        except (TileLangError, TypeError):
            return None

    def live(self, conds: tuple[tuple[Expr, bool], ...]) -> np.ndarray | None:
        """The iterations that certainly satisfy conditions; None when that cannot be decided."""
        out = np.ones(math.prod(self.extents.values()), bool)
        for cond, wanted in conds:
            holds = self.values(cond)
            if holds is None:
                return None
            out &= holds.astype(bool) == wanted
        return out

    def same(self, index: Expr, one: int, two: int) -> bool:
        """Whether an index is the same in two iterations, whatever its other variables are."""
        a, b = (substitute(index, {v: const(int(p[n]), v.dtype) for v, p in self.points.items()}) for n in (one, two))
        return is_const(simplify(convert(a) - b), 0)
