"""Collects the ranges of the integer variables of a launch from its statements, in program order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.ir import Bind, For, Launch, int_range

from .analyzer import Analyzer
from .simplify import extent_bounds
from .value_scalars import value_scalars


class LaunchFacts:
    """The ranges known at one statement of a launch.

    analyzer: answers queries about expressions at this statement.  A walk over the statements calls `enter_loop` before the
    body of a loop and `enter_bind` at a Bind.  A variable is bound once, so its range stays valid after the statement.
    """

    def __init__(self, launch: Launch, params: Iterable[Any]) -> None:
        self.analyzer = Analyzer()
        for v in value_scalars(launch, params):
            self.analyzer.bind(v, *int_range(v.dtype))
        for v, n in zip(launch.thread_vars, launch.threads):
            self.analyzer.bind(v, 0, n - 1)
        for v, extent in zip(launch.block_vars, launch.grid):
            high = self.analyzer.interval(extent)[1]
            self.analyzer.bind(v, 0, 2**31 - 2 if high is None else max(0, min(high - 1, 2**31 - 2)))

    def enter_loop(self, s: For) -> None:
        """Record the range of a loop variable."""
        self.analyzer = self.analyzer.bind(s.var, *extent_bounds(self.analyzer, s.start, s.extent))

    def enter_bind(self, s: Bind) -> None:
        """Record that a bound integer variable has the range of its value."""
        if s.var.dtype.is_int and s.var.dtype.lanes == 1:
            bounds = self.analyzer.interval(s.value)
            if bounds != (None, None) or s.var in self.analyzer.env:
                self.analyzer = self.analyzer.bind(s.var, *bounds)
