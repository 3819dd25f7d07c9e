"""Prepare the body of a parallel loop for distribution: remove `continue`, inline index bindings, reject carried values."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

from tilelang import errors
from tilelang.arith import Analyzer, Linear
from tilelang.arith.linear import emit
from tilelang.ir import (EMPTY, AddressOf, Alloc, Bind, Buffer, Call, Continue, Expr, For, If, Load, Node, Seq, Stmt, Store,
                         Var, binary, contains, free_vars, fresh, is_const, is_large, logical, rebuild, replace, rewrite, seq,
                         stmts_of, substitute, unary, walk, FRAGMENT, VARIABLE)

from .distributed_loop import in_order


def inline_index_binds(body: Stmt) -> Stmt:
    """Substitute scalar integer bindings of loop variables, so that accesses show how they depend on the loop."""
    names: dict[Any, Any] = {}

    def pure(e: Expr) -> bool:
        return e.dtype.is_int and e.dtype.lanes == 1 and \
            not contains(e, Load, Call, AddressOf)

    def visit(n: Any) -> Any:
        if isinstance(n, Seq):
            out: list[Stmt] = []
            for s in n.stmts:
                value = visit_expr(s.value) if isinstance(s, Bind) and pure(s.value) else None
                if value is None or is_large(value, 4):  # it stays a variable: put into each other, large values explode
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


def over_fragment(analyzer: Analyzer, vars: tuple[Var, ...], extents: tuple[Any, ...],
                  body: Stmt) -> tuple[tuple[Var, ...], tuple[Any, ...], Stmt] | None:
    """A loop that accesses fragments at an offset as one over all their elements, so that the owner of each runs it.

    for i in T.Parallel(16): h[i] = F[i + c]     ->     for k in T.Parallel(64): if k >= c and k < c + 16: h[k - c] = F[k]

    None for other loops, and where the offsets of two accesses differ.
    """
    sizes = dict(zip(vars, extents))
    found: list[tuple[Var | None, Expr, Var]] = []  # (variable, offset, the variable of the fragment's dimension)
    at: dict[tuple[Buffer, tuple[Expr, ...]], tuple[Expr, ...]] = {}
    for x in [x for x in walk(body, Load, Store) if x.buffer.scope_name == FRAGMENT]:
        new: list[Expr] = []
        for i, n in zip(x.indices, map(int, x.buffer.shape)):
            moving, offset = offset_of(analyzer, i, vars, body)
            v: Any = next(iter(moving.terms), None)
            if offset is None or v is not None and (v not in vars or len(moving.terms) > 1 or moving.terms[v] != 1):
                return None
            same = next((f for f in found if f[0] is v and (v is not None or f[1].same(offset) and sizes[f[2]] == n)), None)
            if same is None and n > 1:
                plain = v is not None and is_const(offset, 0) and sizes[v] == n
                found.append(same := (v, offset, v if plain else fresh("k", i.dtype)))
                sizes[same[2]] = n
            if same and (not same[1].same(offset) or sizes[same[2]] != n or same[2] in new):
                return None
            new.append(same[2] if same else i)
        at[x.buffer, x.indices] = tuple(new)
    moved, by = [f for f in found if f[0] is not f[2]], {v: k for v, _, k in found}
    if not moved or sum(f[0] is None for f in moved) > 1 or any(sizes[v] != 1 and v not in by for v in vars):
        return None
    body = rewrite(body, lambda x: replace(x, indices=got) if (got := at.get((x.buffer, x.indices))) else None, Load, Store)
    conds = [binary("eq", k, offset) for v, offset, k in moved if v is None]
    conds += [binary(op, k, at) for v, offset, k in moved if v is not None for op, at in (
        ("ge", offset), ("lt", offset + sizes[v]))]
    body = substitute(body, {v: k - offset for v, offset, k in moved if v is not None})
    loop = (*(k for v, _, k in found if v is None), *(by.get(v, v) for v in vars))
    return loop, tuple(sizes[v] for v in loop), If(reduce(partial(logical, "and"), conds), body, span=body.span)


def offset_of(analyzer: Analyzer, index: Expr, vars: tuple[Var, ...], body: Stmt) -> tuple[Linear, Expr | None]:
    """(the terms of an index that differ between iterations of a loop, the rest; None if it may change within the loop)."""
    own, stored = {*vars, *(x.var for x in walk(body, Bind, For))}, {x.buffer.data for x in walk(body, Store)}
    form = analyzer.linear(index)
    moving = Linear({t: c for t, c in form.terms.items() if free_vars(t) & own}, 0)
    rest = emit(form.plus(moving, -1), index.dtype)
    changes = contains(rest, Call) or any(x.buffer.data in stored or x.buffer.scope_name == FRAGMENT for x in walk(rest, Load))
    return moving, None if changes else rest


def drop_continue(body: Stmt) -> Stmt:
    """Turn `continue` of the parallel loop itself into conditions around the statements that follow it."""
    if not contains(body, Continue):
        return body
    return seq(*_without_continue(list(stmts_of(body))))


def _own_continue(s: Stmt) -> bool:
    """Whether s contains a `continue` of the loop around s (not of a loop inside it)."""
    if isinstance(s, Continue):
        return True
    if isinstance(s, Seq):
        return any(map(_own_continue, s.stmts))
    if isinstance(s, If):
        return _own_continue(s.then) or (s.orelse is not None and _own_continue(s.orelse))
    return False


def _without_continue(stmts: list[Stmt]) -> list[Stmt]:
    out: list[Stmt] = []
    for k, s in enumerate(stmts):
        if isinstance(s, Continue):
            return out
        if not _own_continue(s):
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


def reject_carried(body: Stmt, span: Any) -> None:
    """Raise parallel-carried where a variable outlives an iteration (`break` was rejected before)."""
    order: list[tuple[Node, bool]] = []
    in_order(body, False, order)
    own = {x.buffer for x in walk(body, Alloc)}
    read: set[Buffer] = set()
    written: set[Buffer] = set()
    for x, _ in order:
        buffer = x.buffer  # type: ignore[attr-defined]
        if buffer.scope_name != VARIABLE or buffer in own:
            continue
        if isinstance(x, Load):
            if buffer not in written:
                read.add(buffer)
        else:
            written.add(buffer)
            if buffer in read:
                raise errors.error("parallel-carried", f"`{buffer.name}` carries a value from one iteration of "
                                   "T.Parallel to the next",
                                   found=f"`{buffer.name}`, read and changed by each", span=getattr(x, "span", None) or span)


def renamed(body: Stmt) -> Stmt:
    """A copy of body that binds variables and buffers of its own."""
    mapping: dict[Any, Any] = {}
    for x in walk(body):
        if isinstance(x, (Bind, For)):
            mapping[x.var] = fresh(x.var.name, x.var.dtype)
        elif isinstance(x, Alloc):
            b = x.buffer
            mapping[b] = Buffer(b.name, b.shape, b.dtype, b.scope_name, b.strides_, b.offset, facts=b.facts,
                                span=b.span)
    return substitute(body, mapping)


__all__ = ["drop_continue", "inline_index_binds", "offset_of", "over_fragment", "reject_carried", "renamed"]
