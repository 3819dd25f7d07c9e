"""Facts about values: their ranges, and whether their arithmetic may wrap around."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.arith import Analyzer, LaunchFacts, is_large, value_scalars
from tilelang.arith.bounds import inside
from tilelang.ir import (Binary, Bind, Broadcast, Call, Cast, Const, Expr, For, Launch, Load, Ramp, Select, Shuffle, Unary, Var,
                         substitute)
from tilelang.target.warp_groups import WARP_LANES, warps_of


class ValueFacts:
    """The facts at one statement of a launch. The caller reports loops and bindings as it goes over the statements."""

    def __init__(self, launch: Launch, params: Iterable[Any]) -> None:
        params = tuple(params)
        self._ranges, self._launch = LaunchFacts(launch, params), launch
        self.branches: list[tuple[Expr, bool]] = []  # around the statement: the condition, and whether it holds
        self._from_memory: set[Var] = set(value_scalars(launch, params))  # variables whose value comes from memory
        self._known: dict[int, tuple[Expr, bool]] = {}
        self._values: dict[Var, Expr] = {}  # of bound integers that do not depend on memory

    @property
    def analyzer(self) -> Analyzer:
        """Answers questions about index expressions."""
        return self._ranges.analyzer

    def enter_loop(self, s: For) -> None:
        """Record a loop, before its body is printed."""
        self._ranges.enter_loop(s)

    def enter_bind(self, s: Bind) -> None:
        """Record a binding, after it is printed."""
        self._ranges.enter_bind(s)
        if self.from_data(s.value):
            self._from_memory.add(s.var)
        elif s.var.dtype.is_int and s.var.dtype.lanes == 1:
            self._values[s.var] = s.value

    def set_value(self, v: Var, value: int) -> None:
        """Record that a variable has one value from here on."""
        self._ranges.analyzer = self.analyzer.bind(v, value, value)

    def inside(self, e: Expr, size: int) -> bool:
        """Whether an index is certainly at least 0 and below `size`, from the ranges of its variables or from their values."""
        tested = (self._tested(),) if self.branches else ()
        return any(inside(analyzer.interval(x), 0, size - 1)
                   for x in (e, substitute(e, self._values)) for analyzer in (self.analyzer, *tested))

    def _tested(self) -> Analyzer:
        """What is known in the branches around the statement as well."""
        out, (x, *others) = self.analyzer, self._launch.threads
        for cond, holds in self.branches:
            warps = warps_of(cond)
            if warps is None:
                out = out.assuming(cond, holds)
            elif others == [1, 1]:
                first, end = warps[0] * WARP_LANES, (warps[0] + warps[1]) * WARP_LANES
                low, high = (first, end) if holds else (0, first) if end == x else (end, x) if first == 0 else (0, x)
                out = out.bind(self._launch.thread_vars[0], low, high - 1)
        return out

    def not_negative(self, e: Expr) -> bool:
        """Whether an integer is certainly at least 0."""
        low = self.analyzer.interval(e)[0]
        return low is not None and low >= 0

    def above_least(self, x: Expr) -> bool:
        """Whether an integer is certainly not the least number of its width, whose negative does not exist."""
        low, high = self.analyzer.interval(x) if x.dtype.lanes == 1 else (None, None)
        end = 1 << x.dtype.bits - 1
        return low is not None and low > -end and (x.dtype.is_signed or high is not None and high < end)

    def from_data(self, e: Expr) -> bool:
        """Whether a value depends on memory or a call, or is a hash: its range is unknown, and it may wrap around."""
        hit = self._known.get(id(e))
        if hit is not None:
            return hit[1]
        if isinstance(e, (Load, Call)):
            out = True
        elif isinstance(e, Var):
            return e in self._from_memory
        elif isinstance(e, (Binary, Unary, Cast, Select, Ramp, Broadcast)):
            out = any(self.from_data(x) for x in (getattr(e, f, None) for f in ("a", "b", "value", "base", "stride"))
                      if isinstance(x, Expr)) or self._may_wrap(e)
        else:
            out = isinstance(e, Shuffle) and any(map(self.from_data, e.vectors))
        self._known[id(e)] = (e, out)
        return out

    def _may_wrap(self, e: Expr) -> bool:
        """Whether e is the arithmetic of a hash or a generator of random numbers, which wraps."""
        if not (isinstance(e, Binary) and e.op in ("add", "sub", "mul") and e.dtype.is_signed and e.dtype.lanes == 1):
            return False
        if not any(isinstance(x, Const) and is_large(x.value, e.op, e.dtype) for x in (e.a, e.b)):
            return False  # the search below takes long: printing is half of the compile time
        return not self.analyzer.exact(self.analyzer.linear(e), e.dtype)
