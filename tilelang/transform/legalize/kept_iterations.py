"""Runs a pipelined loop only over the iterations whose condition holds, so that nothing of its body is conditional.

                                                        kept = 0
    for k in T.Pipelined(n, num_stages=2):              for k in range(n):
        if M[b, k] != 0:                                    if M[b, k] != 0: which[kept] = k; kept += 1
            copy(K[k], K_s)                     ->      for t in T.Pipelined(kept, num_stages=2):
            gemm(Q_s, K_s, S)                               copy(K[which[t]], K_s)
            …                                               gemm(Q_s, K_s, S)
                                                            …

A copy under a condition is not loaded ahead, and no GEMM runs under what follows a branch.  Each thread keeps the list, so both
warp roles have it.
"""

from __future__ import annotations

from tilelang.ir import (Alloc, Bind, Buffer, Const, Expr, For, If, Launch, Stmt, Store, cast, const, contains, convert, dtype,
                         fresh, leaves, load, replace, rewrite_stmts, seq, stmts_of, substitute, GLOBAL, LOCAL, VARIABLE)
from tilelang.ops import Copy, Gemm

from ..analysis.divergence import Divergence
from ..analysis.effects import effects, expr_effects
from ..analysis.pipeline_loops import is_pipelined
from ..analysis.statements import rename
from ..framework.pass_ import TILE, PassContext, pass_

MOST_ITERATIONS = 256  # whose numbers are bytes


@pass_(needs=TILE, of=Launch)
def kept_iterations(launch: Launch, cx: PassContext) -> Launch:
    """Take the condition around the whole body of a pipelined loop in front of the loop.

    The condition must not depend on what the launch writes, nor on threads.  Keeps: the statements that run, and their order.
    """
    written = {e.storage for e in effects(launch.body) if e.writes}

    def plain(e: Expr) -> bool:
        return all(
            not x.writes and x.buffer.scope_name == GLOBAL and x.storage not in written for x in expr_effects(e)) and \
            not Divergence(launch).divergent(e)

    def visit(s: Stmt) -> Stmt | None:
        if not isinstance(s, For) or not is_pipelined(s) or s.plan.counted or not isinstance(s.extent, Const) or not \
                2 <= s.extent.value <= MOST_ITERATIONS:
            return None
        *binds, last = stmts_of(s.body) or (s.body,)
        if not isinstance(last, If) or last.orelse is not None or not plain(last.cond) or not contains(last.then, Gemm, Copy) \
                or leaves(s.body) or not all(isinstance(x, Bind) and plain(x.value) for x in binds):
            return None
        return _split(s, binds, last)

    return replace(launch, body=rewrite_stmts(launch.body, visit))


def _split(s: For, binds: list[Stmt], last: If) -> Stmt:
    """The loop that makes the list, and the loop over the list."""
    which = Buffer(f"{s.var.name}_kept", (int(s.extent.value),), dtype("uint8"), LOCAL, span=s.span)  # type: ignore[attr-defined]
    kept = Buffer("kept", (1,), dtype("int32"), VARIABLE, span=s.span)
    number, zero = load(kept, (const(0),)), (const(0),)
    k, t = fresh(s.var.name, s.var.dtype), fresh("kept_step", "int32")
    first = convert(s.start)
    found = seq(Store(which, (number,), cast(s.var - first, "uint8")), Store(kept, zero, number + 1))
    made, = rename([replace(s, kind="serial", body=seq(*binds, If(last.cond, found, span=last.span)))])
    loop = replace(s, var=t, start=const(0), extent=number, body=seq(
        Bind(k, cast(load(which, (t,)), k.dtype) + first, span=s.span),
        *(substitute(x, {s.var: k}) for x in (*binds, last.then))))
    return seq(Alloc(which), Alloc(kept), Store(kept, zero, const(0)), made, loop, span=s.span)
