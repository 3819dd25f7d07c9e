"""Ranges of the integers of a block on the CPU target, which passes use for proofs and codegen for index arithmetic."""

from __future__ import annotations

from tilelang.arith import Analyzer
from tilelang.ir import Bind, Const, Expr, For, Launch, Parallel

from .cpu_launch import WarpRole


def with_indices(a: Analyzer, s: Launch, warp_role: WarpRole) -> Analyzer:
    """Add the ranges of the block and thread indices in the code of a warp role to an analyzer."""
    for v, extent in zip(s.block_vars, s.grid):
        hi = Analyzer().interval(extent)[1]
        a = a.bind(v, 0, None if hi is None else max(hi - 1, 0))
    for v, (lo, end) in zip(s.thread_vars, thread_ranges(s, warp_role)):
        a = a.bind(v, lo, end - 1)
    return a


def thread_ranges(s: Launch, warp_role: WarpRole) -> list[tuple[int, int]]:
    """(first, end) of each thread index in a warp role."""
    ranges = warp_role.ranges
    one_range = len(ranges) == 1 and ranges != ((0, s.num_threads),)
    return [ranges[0] if one_range and n == s.num_threads else (0, n) for n in s.threads]


def with_loop(a: Analyzer, s: For) -> Analyzer:
    """Add the range of a loop's variable to an analyzer."""
    lo, hi = a.interval(s.start)
    count = a.interval(s.extent)[1]
    if lo is None and hi is None:
        return a
    return a.bind(s.var, lo, None if hi is None or count is None else max(hi + count - 1, lo or 0))


def with_nest(a: Analyzer, s: Parallel) -> Analyzer:
    """Add the ranges of the variables of a parallel loop nest to an analyzer."""
    for v, e in zip(s.vars, s.extents):
        hi = a.interval(e)[1]
        a = a.bind(v, 0, None if hi is None else max(hi - 1, 0))
    return a


def with_value(a: Analyzer, s: Bind) -> Analyzer:
    """Add the range of a bound variable to an analyzer."""
    if s.var.dtype.is_signed and s.var.dtype.lanes == 1 and s.value.dtype == s.var.dtype:
        return a.bind(s.var, *a.interval(s.value))
    return a


def is_in_range(a: Analyzer, e: Expr | int, size: Expr | int) -> bool:
    """Whether 0 <= e < size is proven."""
    if isinstance(e, (int, Const)):
        return isinstance(size, int) and 0 <= int(e) < size
    if not isinstance(size, int):
        return False
    lo, hi = a.bounds_of(a.linear(e)) if e.dtype.is_signed else a.interval(e)
    return lo is not None and hi is not None and lo >= 0 and hi < size
