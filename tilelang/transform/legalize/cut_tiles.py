"""Finds float32 tiles whose elements are tf32 numbers already, so that no GEMM has to round them.

    for i, j in T.Parallel(64, 32):
        high[i, j] = reinterpret((reinterpret(x[i, j], int32) + 4096) & -8192)        # high: BufferFacts(tf32=True)
        low[i, j] = reinterpret(reinterpret(x[i, j] - high[i, j], int32) & -8192)     # low: the same
    gemm(high, W, acc)

The instructions read the upper 19 bits of a float32.  Where the lower 13 bits of all elements are 0, wgmma may read a tile in
shared memory as it is, and mma.sync its registers.
"""

from __future__ import annotations

from tilelang.ir import (Binary, Bind, Call, Const, Expr, Func, Launch, Store, Var, replace, rewrite_launches, substitute, walk,
                         FRAGMENT, SHARED)

from ..analysis.effects import effects
from ..framework.pass_ import TILE, PassContext, pass_

_UNREAD = (1 << 13) - 1  # bits of a float32 that are not in tf32


@pass_(needs=TILE)
def cut_tiles(func: Func, cx: PassContext) -> Func:
    """Gives tiles to which only tf32 numbers are stored the fact `tf32`."""
    return rewrite_launches(func, _marked)


def _marked(launch: Launch) -> Launch:
    names = {x.var: x.value for x in walk(launch.body, Bind)}
    cut: dict[Var, bool] = {}
    buffers = {}
    for e in effects(launch.body):
        if e.buffer.scope_name in (*SHARED, FRAGMENT) and e.buffer.dtype.base in ("float32", "tfloat32"):
            buffers[e.buffer] = e.storage
            if e.writes:
                cut[e.storage] = cut.get(e.storage, True) and isinstance(e.node, Store) and _is_cut(
                    names.get(e.node.value, e.node.value))  # type: ignore[arg-type]
    return substitute(launch, {  # type: ignore[no-any-return]
        b: replace(b, facts=b.facts.having(tf32=True)) for b, v in buffers.items() if cut.get(v)})


def _is_cut(e: Expr) -> bool:
    """Whether the value is a tf32 number."""
    if not isinstance(e, Call) or e.op != "reinterpret" or not isinstance(e.args[0], Binary) or e.args[0].op != "bitand":
        return False
    return any(isinstance(x, Const) and int(x.value) & _UNREAD == 0 for x in (e.args[0].a, e.args[0].b))
