"""Ranges and divisors of variables that are known at the place which is being lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.arith import Analyzer, known_divisor
from tilelang.ir import Call, Expr, Func, Launch, Load, Var, contains

from ..analysis.assumptions import promised


class KnownRanges:
    """The known facts about variables.  analyzer: their ranges.  divisors: known divisors of bound variables.

    thread: the linear index of a thread in its block.
    """

    def __init__(self, func: Func, launch: Launch, thread: Var) -> None:
        self.analyzer, self.divisors = promised(func)
        for v, n in zip(launch.thread_vars, launch.threads):
            self.bind(v, n)
        self.bind(thread, launch.num_threads)
        for v, g in zip(launch.block_vars, launch.grid):
            hi = self.analyzer.interval(g)[1]
            self.analyzer = self.analyzer.bind(v, 0, None if hi is None else max(hi - 1, 0))

    def bind(self, var: Var, extent: int, first: int = 0) -> None:
        """Record that a variable is one of first .. first+extent-1."""
        self.analyzer = self.analyzer.bind(var, first, first + extent - 1)

    def bind_value(self, var: Var, value: Expr, divisor: int = 1) -> None:
        """Record the range and divisor of a variable that equals value."""
        if var.dtype.is_int and var.dtype.lanes == 1:
            lo, hi = self.analyzer.interval(value)
            self.analyzer = self.analyzer.bind(var, lo, hi)
            known = self.divisor(value)
            self.divisors[var] = known if known == 0 or known % divisor == 0 else divisor

    def divisor(self, e: Expr) -> int:
        """An integer known to divide e; 0 for zero."""
        return known_divisor(e, self.divisors, self.analyzer)

    def over(self, vars: tuple[Var, ...], extents: tuple[Any, ...]) -> Analyzer:
        """The analyzer that also knows the ranges of these loops."""
        out = self.analyzer
        for v, n in zip(vars, extents):
            out = out.bind(v, 0, n - 1 if isinstance(n, int) else None)
        return out

    def under(self, cond: Expr, holds: bool, work: Callable[[], Any]) -> Any:
        """The result of work(), run with the knowledge that cond holds (or does not)."""
        saved = self.analyzer
        if cond.dtype.is_bool and cond.dtype.lanes == 1 and not contains(cond, Load, Call):
            self.analyzer = saved.assuming(cond, holds)
        try:
            return work()
        finally:
            self.analyzer = saved
