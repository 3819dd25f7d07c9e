"""Diagnoses accesses of block and thread memory that certainly lie outside of it: they have no guards."""

from __future__ import annotations

from typing import Any

from tilelang import errors
from tilelang.arith import Analyzer
from tilelang.ir import Buffer, Expr, Var, GLOBAL


def check_bounds(a: Analyzer, swept: set[Var], b: Buffer, indices: tuple[Expr, ...], span: Any,
                 extents: tuple[Any, ...] = ()) -> None:
    """Raises cpu-out-of-bounds for an access that certainly lies outside of b, at a place that certainly runs.

    swept: variables that take every value of their range.  extents: elements accessed per dimension (default 1).  Only indices
    linear in swept variables are certain.
    """
    if b.scope() == GLOBAL or len(indices) != len(b.shape):
        return
    for d, (e, size) in enumerate(zip(indices, b.shape)):
        more = extents[d] - 1 if extents and isinstance(extents[d], int) else 0
        if not isinstance(size, int) or not e.dtype.is_signed or e.dtype.lanes > 1:
            continue
        form = a.linear(e)
        if not all(isinstance(t, Var) and t in swept for t in form.terms):
            continue
        low, high = a.bounds_of(form)
        if low is None or high is None or low >= 0 and high + more < size:
            continue
        index = low if low < 0 else high + more
        raise errors.error(
            "cpu-out-of-bounds", f"{b.name} is accessed at index {index} of dimension {d}, which has {size} elements",
            expected=f"an index from 0 to {size - 1}", found=f"{index}", span=span,
            hint="memory of a block is not guarded: make it larger, or guard the access with a condition")


__all__ = ["check_bounds"]
