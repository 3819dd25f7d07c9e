"""Comparisons of thread numbers with kernel parameters of unknown value (`i == n`)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tilelang.ir import Bind, Binary, Const, Expr, Launch, Var, free_vars, walk

MOST = 160  # most combinations of parameter values that are followed


class Answers:
    """The values that one walk assumes for parameters that threads compare with their numbers for equality.

    A value is a number, or None for one that equals no thread's number.  asked: the numbers that were compared with parameters
    that `given` does not name.
    """

    def __init__(self, launch: Launch, given: dict[Var, int | None]) -> None:
        self.launch, self.given = launch, given
        self.asked: dict[Var, set[int]] = {}
        self._outer: set[Var] | None = None
        self._names: dict[Var, Expr] = {}

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
