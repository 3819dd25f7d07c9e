"""Finds the scalar parameters of a call that are plain values and used in no index or size.

    O[i] = (seed * 31 + i) % 7        seed is a value: its arithmetic may wrap
    O[start + i] = start % 7          start is used in an index: start + i is assumed not to wrap
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Buffer, Call, Cast, Evaluate, Expr, For, Launch, Load, Parallel,
                         Region, Stmt, Store, Var, children, int_range, walk)

from .analyzer import Analyzer
from .simplify import extent_bounds


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


def launch_analyzer(launch: Launch, params: Iterable[Any] = ()) -> Analyzer:
    """What is known of all variables of a launch at once.  params: scalars of the program, see LaunchFacts."""
    facts = LaunchFacts(launch, params)
    for s in walk(launch.body, For, Bind):  # in program order: a value's terms are bound before it
        (facts.enter_loop if isinstance(s, For) else facts.enter_bind)(s)
    return facts.analyzer


_REMAINDERS = ("floormod", "truncmod", "bitand")  # operations that make an index of a hash


def value_scalars(stmt: Stmt, params: Iterable[Any]) -> list[Var]:
    """The integer variables of `params` that occur in no index, size or trip count of stmt, except below a remainder.

    Conditions do not count: a scalar that is only compared may have any value.  Other parameters are ignored.
    """
    scalars = [p for p in params if isinstance(p, Var) and p.dtype.is_int and p.dtype.lanes == 1]
    if not scalars:
        return []
    places: set[Var] = set()
    binds: list[Bind] = []
    for x in walk(stmt):
        if isinstance(x, Bind):
            binds.append(x)
        else:
            for e in _places(x):
                _add_vars(e, places)
    for b in reversed(binds):  # binds are in program order, so a variable is defined before the values that use it
        if b.var in places:
            _add_vars(b.value, places)
    return [v for v in scalars if v not in places]


def _places(x: Any) -> Iterable[Any]:
    """The expressions of one node that are indices, sizes or trip counts."""
    if isinstance(x, (Load, Store, AddressOf)):
        return *x.indices, *_sizes(x.buffer)
    if isinstance(x, Region):
        return *x.mins, *x.extents, *_sizes(x.buffer)
    if isinstance(x, For):
        return x.start, x.extent
    if isinstance(x, Launch):
        return x.grid
    if isinstance(x, Parallel):
        return x.extents
    if isinstance(x, Alloc):
        return _sizes(x.buffer)
    if isinstance(x, Evaluate) and not x.call.op.startswith("atomic_"):
        return x.call.args  # coordinates, sizes and phases of copies and barriers
    return ()


def _sizes(b: Buffer) -> tuple[Any, ...]:
    return *b.shape, *b.strides, b.offset


def _add_vars(e: Any, out: set[Var]) -> None:
    """Add the variables of an index to out, except those below a remainder or a conversion from floats."""
    stack = [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Var):
            out.add(x)
        elif isinstance(x, Binary) and x.op in _REMAINDERS or isinstance(x, (Load, Call)):
            continue  # the walk of value_scalars visits the load itself, and with it the indices
        elif isinstance(x, Cast) and not x.value.dtype.is_int:
            continue
        elif isinstance(x, Expr):
            stack += children(x)
