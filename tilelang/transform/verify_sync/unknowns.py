"""What a run assumes about numbers that are known only at run time, in programs without mbarriers and warp roles."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tilelang.ir import Bind, Binary, Const, Expr, Launch, Load, Var, free_vars, walk

from .uniform import Uniform

SAMPLES = (0, 1, 3, 6)  # assumed for unknown numbers that are equal in all threads: one run each where a condition uses one
MOST = 160  # most combinations of parameter values that are followed


class Unknowns:
    """The assumptions of one run.

    trial: which of SAMPLES unknown numbers have in conditions that are equal in all threads; such a condition without numbers
    holds in the first run and fails in the others.  sampled: whether a condition was.  extent: iterations of loops of unknown
    length, None: as many as show all slots of a ring.

    given: parameters that threads compare with their numbers for equality (`i == n`): a number, or None for one that equals
    no thread's number.  asked: the numbers that were compared with parameters that `given` does not name.
    """

    def __init__(self, launch: Launch, uniform: Uniform, extent: int | None, trial: int, given: dict[Var, int | None]) -> None:
        self.launch, self.uniform, self.extent, self.trial, self.given = launch, uniform, extent, trial, given
        self.sampled = self._guessing = False
        self.asked: dict[Var, set[int]] = {}
        self._outer: set[Var] | None = None
        self._names: dict[Var, Expr] = {}

    def truth(self, e: Expr, st: Any) -> Any:
        """The value of an unknown condition in the frame of a stream: that of this trial, if the threads have it in common."""
        self._guessing = True
        c = st.values(e, st)
        self._guessing = False
        alike = not self.uniform.differs(e)
        self.sampled |= alike or c is not None
        return self.trial == 0 if alike and (self.trial < 2 or c is None) else c

    def number(self, e: Load) -> int | None:
        """The number that an unknown one in memory is taken to be; None outside of `truth`."""
        return SAMPLES[self.trial] if self._guessing and not self.uniform.differs(e) else None

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
