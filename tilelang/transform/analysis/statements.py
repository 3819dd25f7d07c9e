"""Functions that build and copy statements, for passes."""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Call, Evaluate, Expr, For, Parallel, Seq, Stmt, Var, call, fresh, replace, stmts_of,
                         substitute, walk)

# Calls at which all threads of a block wait.
BARRIERS = frozenset(("sync_threads", "syncthreads_count", "syncthreads_and", "syncthreads_or", "sync_grid"))


def do(name: str, *args: Expr, **attrs: Any) -> Stmt:
    """A statement that makes a call for its effect."""
    return Evaluate(call(name, args, "void", **attrs))


def rename(stmts: list[Stmt]) -> list[Stmt]:
    """Copies of statements with fresh variables and buffers for all they define."""
    whole = Seq(tuple(stmts))
    mapping: dict[Any, Any] = {}
    for x in walk(whole, Bind, For, Parallel, Alloc):
        if isinstance(x, (Bind, For)):
            mapping[x.var] = fresh(x.var.name, x.var.dtype)
        elif isinstance(x, Parallel):
            mapping.update((v, fresh(v.name, v.dtype)) for v in x.vars)
        elif isinstance(x, Alloc):
            mapping[x.buffer] = replace(x.buffer, data=Var(x.buffer.name, x.buffer.data.dtype))
    return list(stmts_of(substitute(whole, mapping))) if mapping else stmts


def barrier(s: Stmt, by_group: bool = False) -> Stmt:
    """A block barrier, with the span of the statement that needs it.  by_group: one for each warp group."""
    return Evaluate(call("sync_threads", (), "void", by_group=by_group or None), span=s.span)


def barrier_in(s: Stmt) -> bool:
    """Whether a statement, without nested ones, is a block barrier."""
    c: Any = s.call if isinstance(s, Evaluate) else s.value if isinstance(s, Bind) else None
    return isinstance(c, Call) and c.op in BARRIERS


__all__ = ["BARRIERS", "barrier", "barrier_in", "do", "rename"]
