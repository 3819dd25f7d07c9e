"""Prepare the body of a parallel loop for distribution: remove `continue`, inline index bindings."""

from __future__ import annotations

from typing import Any

from tilelang.ir import (EMPTY, AddressOf, Bind, Buffer, Call, Const, Continue, Expr, If, Load, Select, Seq, Stmt, Store, Var,
                         free_vars, contains, is_large, jumps_of, rebuild, seq, stmts_of, substitute, unary, walk, FRAGMENT)



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

    def visit(n: Any) -> Any:
        if isinstance(n, Seq):
            out: list[Stmt] = []
            for s in n.stmts:
                value = visit_expr(s.value) if isinstance(s, Bind) else None
                if value is None or not pure(value) or is_large(value, 4):  # it stays a variable: large values would explode
                    out.append(rebuild(s, visit) if isinstance(s, Bind) else visit(s))
                else:
                    names[s.var] = value  # type: ignore[attr-defined]
            return seq(*out, span=n.span)
        if isinstance(n, Bind) and pure(n.value):
            return EMPTY
        if isinstance(n, Stmt):
            return rebuild(n, visit)
        if isinstance(n, tuple):
            return tuple(visit(x) for x in n)
        return visit_expr(n) if isinstance(n, Expr) else n

    def visit_expr(e: Expr) -> Expr:
        return substitute(e, names) if names else e

    return visit(body) if contains(body, Bind) else body


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
    while isinstance(value, Select) and (_is_zero(value.a) or _is_zero(value.b)):
        cond, value = (value.cond, value.a) if _is_zero(value.b) else (unary("not", value.cond), value.b)
        conds.append(cond)
    return tuple(conds), value


def _is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0 and not str(e.value).startswith("-")


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
        then, orelse = list(stmts_of(s.then)), list(stmts_of(s.orelse)) if s.orelse is not None else []
        if _ends(then):
            then_new, else_new = _without_continue(then), _without_continue(orelse + rest)
        elif orelse and _ends(orelse):
            then_new, else_new = _without_continue(then + rest), _without_continue(orelse)
        else:
            # No branch ends on every path: the statements that follow are copied into both.
            then_new, else_new = _without_continue(then + rest), _without_continue(orelse + rest)
        if then_new:
            out.append(If(s.cond, seq(*then_new), seq(*else_new) if else_new else None, span=s.span))
        elif else_new:
            out.append(If(unary("not", s.cond), seq(*else_new), span=s.span))
        return out
    return out


def _ends(stmts: list[Stmt]) -> bool:
    return bool(stmts) and isinstance(stmts[-1], Continue)
