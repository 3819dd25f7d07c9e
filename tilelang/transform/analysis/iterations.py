"""The iterations of a parallel loop one by one: what expressions are in each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from tilelang.errors import TileLangError
from tilelang.ir import Call, Expr, Load, Parallel, Var, const, contains, convert, free_vars, is_const, substitute
from tilelang.ir.evaluate import evaluate


class Iterations:
    """The iterations of a loop, if it has at most `most` (few).  extents: None for one that is known at run time only."""

    def __init__(self, loop: Parallel, most: int) -> None:
        self.vars, self.extents = loop.vars, [int(e.value) if is_const(e) else None for e in loop.extents]  # type: ignore
        self.counted = None not in self.extents
        self.count = math.prod(n or 0 for n in self.extents)
        self.few = self.counted and self.count <= most

    @cached_property
    def points(self) -> dict[Var, np.ndarray]:
        """The value of each variable in each iteration."""
        return self.first(max(n or 0 for n in self.extents))

    def first(self, most: int) -> dict[Var, np.ndarray]:
        """The same for `most` values of each variable at most."""
        shape = tuple(most if n is None else min(n, most) for n in self.extents)
        return dict(zip(self.vars, np.indices(shape).reshape(len(shape), -1)))

    def values(self, e: Expr, others: bool = True, calls: bool = False,
               points: dict[Var, np.ndarray] | None = None) -> np.ndarray | None:
        """The value of e in each iteration; None if it cannot be computed.

        others: variables from outside the loop are 0.  calls: functions are computed.
        """
        points = self.points if points is None else points
        more = free_vars(e) - set(points)
        if contains(e, Load) or not calls and contains(e, Call) or e.dtype.lanes > 1 or more and not others:
            return None
        try:
            got = evaluate(e, {**{v: 0 for v in more}, **points})
            return np.broadcast_to(np.asarray(got), (len(next(iter(points.values()))),))
        except (TileLangError, TypeError):
            return None

    def live(self, conds: Iterable[tuple[Expr | None, bool]], certain: bool = True) -> np.ndarray | None:
        """The iterations in which conditions have given values.  One that cannot be decided gives None, or may have it."""
        out = np.ones(self.count, bool)
        for cond, wanted in conds:
            holds = None if cond is None else self.values(cond, not certain, not certain)
            if holds is not None:
                out &= holds.astype(bool) == wanted
            elif certain:
                return None
        return out

    def within(self, e: Expr, n: int) -> Expr:
        """e in one iteration."""
        return convert(substitute(e, {v: const(int(p[n]), v.dtype) for v, p in self.points.items()}))

    def text(self, n: int) -> str:
        """An iteration in words."""
        return ", ".join(f"{v.name}={int(p[n])}" for v, p in self.points.items())
