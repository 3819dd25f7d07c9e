"""Bounds guards of global accesses: the conditions under which an access is inside its buffer, without the proven ones."""

from __future__ import annotations

from typing import Any

from tilelang.arith import Analyzer
from tilelang.arith.flat_index import widened
from tilelang.ir import Binary, Broadcast, Const, Expr, Ramp, Shuffle, Unary, binary, cast, const, logical


def conjuncts(cond: Expr, holds: bool = True) -> list[tuple[Expr, bool]]:
    """Conditions, and whether they hold, that together say that cond does (or does not)."""
    if isinstance(cond, Unary) and cond.op == "not":
        return conjuncts(cond.a, not holds)
    if isinstance(cond, Binary) and cond.op == ("and" if holds else "or"):
        return [*conjuncts(cond.a, holds), *conjuncts(cond.b, holds)]
    return [(cond, holds)]


def operands(e: Expr, op: str) -> list[Expr]:
    """The operands of nested `op`."""
    return [*operands(e.a, op), *operands(e.b, op)] if isinstance(e, Binary) and e.op == op else [e]


def bounds_guard(analyzer: Analyzer, shape: tuple[Any, ...], indices: tuple[Expr, ...], skip: int | None = None) -> Expr | None:
    """0 <= index < extent in every dimension (except `skip`), without what analyzer proves; None: all proven.

    Each dimension is tested separately: an index past the end of a row does not reach into the next row.
    """
    out: Expr | None = None
    for d, (index, extent) in enumerate(zip(indices, shape)):
        if d == skip:
            continue
        if index.dtype.bits > 32 and isinstance(extent, Expr):
            extent = widened(extent)
        for cond in (binary("ge", index, const(0)), binary("lt", index, extent)):
            if isinstance(cond, Const) and cond.value or analyzer.can_prove(cond):
                continue
            out = cond if out is None else logical("and", out, cond)
    return out


def vector_lanes_of(indices: tuple[Expr, ...]) -> list[tuple[Expr, ...]]:
    """The scalar indices of each lane of a vector access; empty when no index is a vector."""
    lanes = max((i.dtype.lanes for i in indices), default=1)

    def at(index: Expr, k: int) -> Expr:
        if isinstance(index, Ramp):
            return binary("add", index.base, binary("mul", index.stride, const(k, index.stride.dtype)))
        return index.value if isinstance(index, Broadcast) else \
            index if index.dtype.lanes == 1 else Shuffle((index,), (k,), index.dtype.scalar)

    return [tuple(at(i, k) for i in indices) for k in range(lanes)] if lanes > 1 else []


def tile_indices(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Indices of a tile, narrowed to int32: a tile never needs more, and layout formulas combine indices of one type."""
    def narrow(i: Expr) -> Expr:
        if isinstance(i, Ramp):
            base, stride = narrow(i.base), narrow(i.stride)
            return Ramp(base, stride, i.lanes, base.dtype.with_lanes(i.lanes))
        return i if i.dtype == "int32" or i.dtype.lanes > 1 else cast(i, "int32")

    return tuple(map(narrow, indices))
