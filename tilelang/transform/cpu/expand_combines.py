"""Reductions and scans by a function as loops."""

from __future__ import annotations

from tilelang.ir import Func
from tilelang.ops.combine import expanded

from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def expand_combines(func: Func, cx: PassContext) -> Func:
    """Each Combine as a parallel loop over its lines, which are combined element after element.

        reduce_with(x, out, dim=1, joined=f)   ->   for i, j in T.Parallel(32, 1):
                                                    state = identity
                                                    for k in range(64): state = f(state, x[i, k])
                                                    out[i] = state
    """
    out: Func = expanded(func)
    return out
