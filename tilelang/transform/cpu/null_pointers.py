"""Tensors made of an address (a table of T.ptr, a pointer parameter) that is null: the call fails, not the process.

An address is tested once, where it is read or where the block begins, when a tensor at it is surely accessed afterwards.  What
stands under a condition may be the user's own test for null: there the test stands behind the condition, and for pointer
parameters in a second form of the launch, which runs where one of them is null.  The first form has no tests inside its
loops, which would keep them from vector code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from tilelang.ir import (Bind, Break, Buffer, Continue, Evaluate, Expr, For, If, Launch, Load, Node, Parallel, Select, Seq,
                         Stmt, Store, TileOp, Var, While, replace, seq, unary, with_inner)
from tilelang.ir.buffer import AddressOf
from tilelang.ir.children import children
from tilelang.ir.visitor import walk
from tilelang.target.cpu_launch import NullCheck

_TEXT = "is made of the null pointer, and used"


def find_null_checks(launch: Launch, parameters: Iterable[Var]) -> tuple[NullCheck, ...]:
    """Addresses to test: those that the launch reads or is given, and whose tensors it surely accesses.

        P = table[i]                         P = table[i]; the call fails if P is null
        A = T.make_tensor(P, ...)     ->
        B[0] = A[0]                          B[0] = A[0]
    """
    out: dict[Var, str] = {}

    def note(v: Var, stmts: tuple[Stmt, ...]) -> None:
        found = _first(v, stmts)
        if found is not None:
            out[v] = _text(*found)

    for v in parameters:
        note(v, (launch.body,))
    for s in walk(launch.body):
        if isinstance(s, Seq):
            for k, x in enumerate(s.stmts):
                if isinstance(x, Bind) and x.var.dtype.is_handle:
                    note(x.var, s.stmts[k + 1:])
    return tuple(NullCheck(v, text) for v, text in out.items())


def check_behind_conditions(launch: Launch, parameters: Iterable[Var]) -> tuple[Launch, tuple[NullCheck, ...]]:
    """The launch with a second name for each of these parameters where a condition or loop leads to a sure use of its tensor,
    and the tests of these names.

        if c: B[0] = A[0]             ->     if c: { P_used = P; the call fails if P_used is null; B[0] = A[0] }
    """
    out: dict[Var, str] = {}

    def check(v: Var, use: tuple[Buffer, Any], span: Any) -> Stmt:
        name = Var(f"{v.name}_used", v.dtype)
        out[name] = _text(*use)
        return Bind(name, v, span=span)

    def conditional(s: Stmt, left: tuple[Var, ...]) -> Stmt:
        """A statement behind a condition; left: parameters not tested before."""
        found = {v: use for v in left if (use := _first(v, (s,))) is not None}
        checks = [check(v, use, s.span) for v, use in found.items()]
        body = below(s, tuple(v for v in left if v not in found))
        return seq(*checks, body) if checks else body

    def choices(e: Node, s: Stmt, left: tuple[Var, ...]) -> Iterator[Stmt]:
        """Tests in front of s for the lazy selections in an expression of it; none for selections inside of a selected side."""
        if isinstance(e, Select) and e.lazy:
            sides = ((e.cond, e.a), (unary("not", e.cond), e.b))
            for cond, side in sides:
                checks = [check(v, use, s.span) for v in left if (use := _of_expr(v, side, s)) is not None]
                if checks:
                    yield If(cond, seq(*checks), span=s.span)
            yield from choices(e.cond, s, left)
            return
        for x in children(e):
            if isinstance(x, Expr):
                yield from choices(x, s, left)

    def below(s: Stmt, left: tuple[Var, ...]) -> Stmt:
        if not left:
            return s
        match s:
            case If() | For() | Parallel() | While():
                return with_inner(s, lambda x: conditional(x, left))  # type: ignore[no-any-return]
            case Store() | Bind() | Evaluate():
                checks = list(choices(s, s, left))
                return seq(*checks, s) if checks else s
        return with_inner(s, lambda x: below(x, left))  # type: ignore[no-any-return]

    body = below(launch.body, tuple(parameters))
    return (replace(launch, body=body) if out else launch), tuple(NullCheck(v, text) for v, text in out.items())


def _text(b: Buffer, span: Any) -> str:
    where = f" ({os.path.basename(span.file)}:{span.line})" if span is not None else ""
    return f"{b.name}{where} {_TEXT}"


def _first(v: Var, stmts: tuple[Stmt, ...]) -> tuple[Buffer, Any] | None:
    """(tensor at v, place) of the first access on every path through these statements."""
    for s in stmts:
        match s:
            case Seq():
                found = _first(v, s.stmts)
            case For() if _is_positive(s.extent):
                found = _first(v, (s.body,))
            case Parallel() if all(map(_is_positive, s.extents)):
                found = _first(v, (s.body,))
            case If():
                found = _of_expr(v, s.cond, s)
            case TileOp():
                touched = [a.region for a in s.accesses() if a.region.buffer.data is v]  # type: ignore[attr-defined]
                sure = [r for r in touched if all(map(_is_positive, r.extents))]
                found = (sure[0].buffer, s.span) if sure else None
            case Bind():
                found = _of_expr(v, s.value, s)
            case Evaluate():
                found = _of_expr(v, s.call, s)
            case Store():
                mine = (s.buffer, s.span) if s.buffer.data is v else None
                found = mine or next((f for e in (*s.indices, s.value) if (f := _of_expr(v, e, s)) is not None), None)
            case _:
                found = None
        if found is not None:
            return found
        if any(isinstance(x, (Break, Continue, While)) or isinstance(x, Evaluate) and x.call.op == "thread_return"
               for x in walk(s)):
            return None
    return None


def _is_positive(extent: Any) -> bool:
    """Whether a loop surely has iterations."""
    n = getattr(extent, "value", extent)
    return isinstance(n, int) and n > 0


def _of_expr(v: Var, e: Node, s: Stmt) -> tuple[Buffer, Any] | None:
    if isinstance(e, Load) and e.buffer.data is v:
        return e.buffer, e.span or s.span
    if isinstance(e, AddressOf):
        return None
    evaluated = (e.cond,) if isinstance(e, Select) and e.lazy else children(e)
    return next((f for x in evaluated if isinstance(x, Node) and not isinstance(x, Buffer) and
                 (f := _of_expr(v, x, s)) is not None), None)
