"""Statements outside of T.Kernel that compute become launches of one block with one thread."""

from __future__ import annotations

from tilelang.ir import I32, Assert, Const, Evaluate, For, Func, If, Launch, Parallel, Stmt, Store, TileOp, Var, While, walk
from tilelang.ir.visitor import rewrite_stmts

from ..framework.pass_ import TILE, PassContext, pass_

NO_WORK = ("assume", "evaluate", "no_op")  # calls outside a kernel that do nothing


@pass_(needs=TILE)
def launch_host_statements(func: Func, cx: PassContext) -> Func:
    """Stores, loops over them and tile operations outside of T.Kernel as launches.

        B[0] = A[0] + 1                      with T.Kernel(1, threads=1): B[0] = A[0] + 1
        with T.Kernel(4): ...        ->      with T.Kernel(4): ...

    A statement that holds a launch, or an assertion, stays host code.
    """
    return rewrite_stmts(func, lambda s: s if isinstance(s, Launch) else _as_launch(s) if is_computation(s) else None)


def is_computation(s: Stmt) -> bool:
    """Whether s stores or runs tile operations, and holds no launch, assertion or name that other statements see."""
    inside = [n for n in walk(s) if isinstance(n, Stmt)]
    if any(isinstance(x, (Launch, Assert)) for x in inside):
        return False
    if isinstance(s, (Store, Parallel, TileOp, While)) or isinstance(s, Evaluate) and s.call.op not in NO_WORK:
        return True
    return isinstance(s, (For, If)) and any(is_computation(x) for x in inside[1:])


def _as_launch(s: Stmt) -> Launch:
    bx, tx, ty, tz = (Var(n, I32) for n in ("bx", "tx", "ty", "tz"))
    return Launch((Const(1, I32),), (bx,), (1, 1, 1), (tx, ty, tz), s, span=s.span)
