"""Functions that build and copy statements, for passes."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Evaluate, Expr, For, If, Launch, Load, Parallel, Seq, Stmt, Var,
                         binary, call, const, contains, fresh, replace, seq, stmts_of, substitute, walk, with_inner)
from tilelang.ir import do as do

# Calls at which all threads of a block wait.
BARRIERS = frozenset(("sync_threads", "syncthreads_count", "syncthreads_and", "syncthreads_or", "sync_grid", "rank_barrier"))


def bound_by(x: object) -> tuple[Var, ...]:
    """The variables that a statement itself binds."""
    return (x.var,) if isinstance(x, (Bind, For)) else x.vars if isinstance(x, Parallel) else ()


def renamed(s: Stmt) -> Stmt:
    """A copy of a statement with fresh variables and buffers for all that it defines."""
    mapping: dict[Any, Any] = {}
    for x in walk(s, Bind, For, Parallel, Alloc):
        mapping.update((v, fresh(v.name, v.dtype)) for v in bound_by(x))
        if isinstance(x, Alloc):
            mapping[x.buffer] = replace(x.buffer, data=Var(x.buffer.name, x.buffer.data.dtype))
    return substitute(s, mapping) if mapping else s


def rename(stmts: list[Stmt]) -> list[Stmt]:
    """Copies of statements with fresh variables and buffers for all they define."""
    whole = Seq(tuple(stmts))
    out = renamed(whole)
    return stmts if out is whole else list(stmts_of(out))


def distinct_statements(s: Stmt) -> Any:
    """The statement with a copy of each repeated statement object, for passes that identify statements by identity.

    Peeled and unrolled iterations repeat the objects that do not depend on the loop.
    """
    return _distinct(s, set())


def _distinct(s: Stmt, seen: set[int]) -> Any:
    if id(s) in seen:
        s = copy(s)
    seen.add(id(s))
    return with_inner(s, lambda x: _distinct(x, seen))


def without_names(body: Stmt) -> list[Stmt]:
    """The statements of a body, with the values of its names in their places, but of those that read memory or are calls."""
    out, named = [], dict[Var, Any]()
    for s in stmts_of(body):
        s = substitute(s, named)
        if isinstance(s, Bind) and not s.var.dtype.is_float and not contains(s.value, Load, Call):
            named[s.var] = s.value
        else:
            out.append(s)
    return out


def barrier(s: Stmt, by_group: bool = False) -> Stmt:
    """A block barrier, with the span of the statement that needs it.  by_group: one for each warp group."""
    return Evaluate(call("sync_threads", (), "void", by_group=by_group or None), span=s.span)


def barrier_in(s: Stmt) -> bool:
    """Whether a statement, without nested ones, is a block barrier."""
    c: Any = s.call if isinstance(s, Evaluate) else s.value if isinstance(s, Bind) else None
    return isinstance(c, Call) and c.op in BARRIERS


def initialised(barriers: Iterable[Buffer], thread: Expr) -> Stmt | None:
    """The first thread's initialisation of mbarriers whose arrivals are known; None where there are none."""
    inits = [do("mbarrier_init", AddressOf(b, (const(k),)), const(n, "uint32"))
             for b in barriers for k, n in enumerate(b.facts.arrive or ())]
    return If(binary("eq", thread, const(0, thread.dtype)), seq(*inits, do("fence_mbarrier_init"))) if inits else None


def around_launch(launch: Launch) -> tuple[list[Stmt], Stmt, list[Stmt]]:
    """(PDL calls at the top of a launch, the rest of its body, PDL calls at its end).

    All threads of a block run these calls, whatever their warp role is in between.
    """
    stmts = list(stmts_of(launch.body))
    at = next((k for k, s in enumerate(stmts) if not isinstance(s, Alloc) or s.init is not None), 0)
    head: list[Stmt] = []
    tail: list[Stmt] = []
    while len(stmts) > at and _dependence(stmts[at]):
        head.append(stmts.pop(at))
    while stmts and _dependence(stmts[-1]):
        tail.insert(0, stmts.pop())
    return head, seq(*stmts, span=launch.body.span), tail


def _dependence(s: Stmt) -> bool:
    return isinstance(s, Evaluate) and isinstance(s.call, Call) and s.call.op in ("pdl_trigger", "pdl_sync")
