"""Guards: the conditions under which an access of a global buffer stays inside it, less what is proven."""

from __future__ import annotations

from typing import Any

from tilelang.arith import Analyzer
from tilelang.arith.width import widened
from tilelang.ir import Buffer, Const, Expr, binary, const, logical


def bounds_guard(analyzer: Analyzer, shape: tuple[Any, ...], indices: tuple[Expr, ...],
                 skip: int | None = None) -> Expr | None:
    """0 <= index < extent in every dimension (except `skip`), leaving out what analyzer proves; None: all proven.

    Each dimension separately: an index past the end of a row does not reach into the next row.
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


def is_guarded(buffer: Buffer) -> bool:
    """Whether accesses of a buffer are guarded at all: only global memory is."""
    return buffer.scope_name == "global"


__all__ = ["bounds_guard", "is_guarded"]
