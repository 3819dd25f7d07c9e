"""Ranges of the integers of a block on the CPU target, which passes use for proofs and codegen for index arithmetic."""

from __future__ import annotations

from tilelang.arith import Analyzer, bound_to, extent_bounds
from tilelang.ir import Bind, Const, Expr, For, Launch

from .cpu_launch import WarpRole


def with_indices(a: Analyzer, s: Launch, warp_role: WarpRole) -> Analyzer:
    """Add the ranges of the block and thread indices in the code of a warp role to an analyzer."""
    a = bound_to(a, s.block_vars, s.grid)
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
    return a.bind(s.var, *extent_bounds(a, s.start, s.extent))


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
