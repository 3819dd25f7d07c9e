"""Loops that the device compiler must not unroll as far as it would."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Call, Const, For, Func, If, Seq, Stmt, rewrite_launches, walk, with_options, with_inner

from ..framework.pass_ import DEVICE, PassContext, pass_

MOST_COPIES = 512  # of a body in the code: what has more elements a thread is in no registers, and compilers choke on it


@pass_(needs=DEVICE)
def limit_unrolling(func: Func, cx: PassContext) -> Func:
    """Keep loops that would fill the code, and loops of warps with few registers: `copies` of their body, one.

        for i in T.unroll(1024): s[i] = ...                 for i in T.unroll(1024, copies=1): s[i] = ...
        for k in T.serial(n):                          ->   for k in T.serial(n, copies=1):
            mbarrier_wait(...); tma_load(...)                   mbarrier_wait(...); tma_load(...)

    Loops on named registers are printed whole.  An unroll factor of the program stays.
    """
    def visit(x: Stmt) -> Any:
        if isinstance(x, For) and x.plan.registers:
            return x
        done = with_inner(x, visit)
        return with_options(done, copies=1) if isinstance(x, For) and _is_kept(x) else done

    return rewrite_launches(func, lambda x: with_inner(x, visit))


def _is_kept(s: For) -> bool:
    if s.kind == "serial":
        return _only_loads(s.body)
    return s.kind in ("unroll", "vectorized") and not s.plan.factor and _copies(s) > MOST_COPIES


def _copies(s: Stmt | None) -> int:
    """How often the innermost statements of s stand in the code when the loops in it are unrolled."""
    if isinstance(s, Seq):
        return max(map(_copies, s.stmts), default=1)
    if isinstance(s, If):
        return max(_copies(s.then), _copies(s.orelse))
    if not isinstance(s, For):
        return 1
    unrolled = s.kind in ("unroll", "vectorized") and isinstance(s.extent, Const)
    return _copies(s.body) * (int(s.extent.value) if unrolled else 1)  # type: ignore[attr-defined]


def _only_loads(s: Stmt) -> bool:
    """Whether a loop asks for tiles and waits for room, as a warp with few registers does: copies of it would spill."""
    ops = {n.op for n in walk(s, Call)}
    return "tma_load" in ops and "mbarrier_wait" in ops and not ops & {"wgmma", "wgmma_wait"}
