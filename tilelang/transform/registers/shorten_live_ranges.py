"""Recomputes thread indices and barrier addresses at rare uses instead of keeping them in registers over a loop.

    for k: wgmma(...) ...                      for k: wgmma(...) ...
    out[tx * 2] = ...                          make_opaque(tx)
                                        ->     out[tx * 2] = ...
    if masked: S[...] = ... tx ...             if masked: tx_1 = opaque_copy(tx); S[...] = ... tx_1 ...
    mbarrier_arrive(full[k % 3])               the same, attr `recompute`

In a launch whose accumulators are all in named registers (attr `own_values`) NVRTC sees few registers in use.  It would keep
values that depend on the thread index, and the address of each barrier, in registers over the whole loop.  ptxas also has to
allocate the named registers and then runs out.  Therefore the thread index is made opaque after an innermost loop with
wgmma and in a branch that few iterations take, and the address of a barrier is computed where a thread arrives at it.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (AddressOf, Bind, Const, Evaluate, For, Func, If, Launch, Stmt, Var, call, free_vars, fresh,
                         rewrite_launches, seq, statements, substitute, with_options, with_inner)
from tilelang.ir import replace as replaced

from .order_register_reductions import borrows_registers
from ..framework.pass_ import DEVICE, PassContext, pass_


@pass_(needs=DEVICE)
def shorten_live_ranges(func: Func, cx: PassContext) -> Func:
    """Make thread indices opaque and barrier addresses local in launches with the attr `own_values`.

    Keeps: every value.
    """
    return rewrite_launches(func, lambda x: _shortened(x) if x.plan.own_values else None)


def _shortened(launch: Launch) -> Launch:
    used = free_vars(launch.body)
    threads = tuple(v for v in launch.thread_vars if v in used)
    offsets = {b.data for b, at in launch.plan.shared_offsets if isinstance(at, int)}

    def visit(x: Any) -> Any:
        if isinstance(x, Evaluate):
            return _arrival(x, offsets)
        done = with_inner(x, visit)
        if isinstance(x, If) and x.orelse is None and borrows_registers(x.then):
            return replaced(done, then=_with_copies(done.then, threads))
        if isinstance(x, For) and x.kind == "serial" and not x.plan.tight and multiplies(x) and not any(
                map(multiplies, statements(x.body))):
            return seq(done, *(Evaluate(call("make_opaque", (v,), "void")) for v in threads))
        return done

    return replaced(launch, body=visit(launch.body))  # type: ignore[no-any-return]


def _with_copies(s: Stmt, threads: tuple[Var, ...]) -> Stmt:
    """The statement with its own copies of the thread indices."""
    own = {v: fresh(v.name, v.dtype) for v in threads}
    return seq(*(Bind(copy, call("opaque_copy", (v,), v.dtype)) for v, copy in own.items()), substitute(s, own))


def _arrival(s: Evaluate, offsets: set[Var]) -> Evaluate:
    """An arrival at one of several barriers, whose address is computed at this place."""
    at: Any = s.call.args[0] if s.call.args else None
    if s.call.op != "mbarrier_arrive" or not isinstance(at, AddressOf) or at.buffer.data not in offsets or \
            isinstance(at.indices[0], Const):
        return s
    return replaced(s, call=with_options(s.call, recompute=True))  # type: ignore[no-any-return]


def multiplies(s: Stmt) -> bool:
    """Whether a loop has wgmma inside."""
    return isinstance(s, For) and any(isinstance(x, Evaluate) and x.call.op == "wgmma" for x in statements(s.body))


__all__ = ["multiplies", "shorten_live_ranges"]
