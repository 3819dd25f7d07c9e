"""Functions that build and copy statements, for passes; the bodies of parallel loops before they are distributed."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Continue, Evaluate, Expr, For, If, Launch, Load, Parallel,
                         Select, Seq, Stmt, Store, Var, binary, call, const, contains, free_vars, fresh, is_large, jumps_of,
                         replace, rewrite_stmts, seq, stmts_of, substitute, unary, walk, with_inner, EMPTY, FRAGMENT)
from tilelang.ir import do as do
from tilelang.target.warp_groups import warps_of

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


def flattened(s: Stmt) -> list[Stmt]:
    """The statements of nested sequences in one list."""
    return [y for x in s.stmts for y in flattened(x)] if isinstance(s, Seq) else [s]


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


# ---- bodies of parallel loops ----------------------------------------------------------------------------------------

def inline_index_binds(body: Stmt, vars: tuple[Var, ...]) -> Stmt:
    """Substitute scalar integer bindings of loop variables, so that accesses show how they depend on the loop.

    Where the loop only moves memory, booleans too, and integers from memory that it does not write and that have one value
    along some loop, as indices of rows: they decide which vectors it moves.
    """
    names: dict[Any, Any] = {}
    moves = not any(b.scope_name == FRAGMENT for b in walk(body, Buffer))
    written = {s.buffer.data for s in walk(body, Store)}

    def pure(e: Expr) -> bool:
        if moves and len(vars) > 1 and e.dtype.is_int and e.dtype.lanes == 1 and contains(e, Load) and not contains(body, Call):
            return not free_vars(e) >= {*vars} and all(x.buffer.data not in written for x in walk(e, Load))
        return (e.dtype.is_int or moves and e.dtype.is_bool) and e.dtype.lanes == 1 and \
            not contains(e, Load, Call, AddressOf)

    for s in walk(body, Bind):  # in program order: a value's terms are bound before it
        value = substitute(s.value, names)
        if pure(value) and not is_large(value, 4):  # others stay variables: large values would explode
            names[s.var] = value
    left = rewrite_stmts(body, lambda s: EMPTY if isinstance(s, Bind) and s.var in names else None)
    return substitute(left, names) if names else body


def select_stores(body: Stmt) -> Stmt:
    """Branches that store to one element become one store of either value: `if c: s[i] = x; else: s[i] = 0`."""
    if isinstance(body, If) and body.orelse is not None:
        a, b = select_stores(body.then), select_stores(body.orelse)
        if isinstance(a, Store) and isinstance(b, Store) and a.buffer is b.buffer and a.indices == b.indices:
            return Store(a.buffer, a.indices, Select(body.cond, a.value, b.value, a.value.dtype, True), span=a.span)
    return body


def copied(value: Expr) -> tuple[tuple[Expr, ...], Expr]:
    """(conditions, source) of a value that is a source under conditions, otherwise zero."""
    conds: list[Expr] = []
    while isinstance(value, Select) and (is_zero(value.a) or is_zero(value.b)):
        cond, value = (value.cond, value.a) if is_zero(value.b) else (unary("not", value.cond), value.b)
        conds.append(cond)
    return tuple(conds), value


def is_zero(e: Expr) -> bool:
    """Whether a value is +0."""
    return isinstance(e, Const) and e.value == 0 and not str(e.value).startswith("-")


def is_positive(extent: Any) -> bool:
    """Whether a loop surely has iterations."""
    n = getattr(extent, "value", extent)
    return isinstance(n, int) and n > 0


def drop_continue(body: Stmt) -> Stmt:
    """Turn `continue` of the parallel loop itself into conditions around the statements that follow it."""
    if not contains(body, Continue):
        return body
    return seq(*_without_continue(list(stmts_of(body))))


def _without_continue(stmts: list[Stmt]) -> list[Stmt]:
    out: list[Stmt] = []
    for k, s in enumerate(stmts):
        if isinstance(s, Continue):
            return out
        if not any(isinstance(x, Continue) for x in jumps_of(s)):
            out.append(s)
            continue
        rest = stmts[k + 1:]
        if not isinstance(s, If):
            return out + _without_continue([*stmts_of(s), *rest])
        # A branch goes on with the statements that follow, up to where it continues.
        then_new, else_new = (_without_continue([*(() if x is None else stmts_of(x)), *rest]) for x in (s.then, s.orelse))
        if then_new:
            out.append(If(s.cond, seq(*then_new), seq(*else_new) if else_new else None, span=s.span))
        elif else_new:
            out.append(If(unary("not", s.cond), seq(*else_new), span=s.span))
        return out
    return out


def has_warp_roles(s: Stmt) -> bool:
    """Whether s contains a branch by warp role."""
    return any(warps_of(x.cond) is not None for x in walk(s, If))
