"""Shortens index arithmetic."""

from __future__ import annotations

from tilelang.arith import simplify_stmt, value_scalars
from tilelang.ir import Func, int_range, replace

from ..framework.pass_ import DEVICE, PassContext, pass_


@pass_(needs=DEVICE)
def simplify(func: Func, cx: PassContext) -> Func:
    """Simplify every expression with the ranges of loops, bindings and conditions; drop branches whose condition is known.

    Before:  S[(k + 0 * 32) % 3 * 4096 + tx // 1]      After:  S[k % 3 * 4096 + tx]
    """
    wrap = {v: int_range(v.dtype) for v in value_scalars(func.body, func.params)}
    return replace(func, body=simplify_stmt(func.body, wrap))
