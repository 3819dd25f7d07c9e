"""Bind calls of the user's functions to names, so that each runs as often as it is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Alloc, Assert, Binary, Bind, Call, Evaluate, Expr, For, Func, If, Load, Node, Select, Stmt,
                         Store, TileOp, Var, While, called, children, rewrite, rewrite_stmts, seq)

from ..framework.pass_ import TILE, PassContext, pass_

register("extern-repeated", ValueError, "the result of a T.call_extern as an index where it may not be evaluated",
         "assign the result to a name in a statement before: `i = T.call_extern(...)`",
         expected="an index that is computed before the statement")


@pass_(needs=TILE)
def bind_calls(func: Func, cx: PassContext) -> Func:
    """Bind calls with effects that a statement would make several times, or that lowering would repeat.

    Before:  B[f()] = g()                                     After:  g_ = g();  f_ = f();  B[f_] = g_
    Indices appear in guards as well as in the access, and `0 <= f() < n` or T.pow(f(), 3) hold one call several times.
    Calls keep the order in which they were traced. Must run before the passes that write guards. Raises extern-repeated
    where such a call must not run before the statement: in an arm of a select, after `and` or `or`, in the condition of a
    while loop.
    """
    def fn(s: Stmt) -> Stmt | None:
        if isinstance(s, (Store, Evaluate, Bind, Alloc, If, For, Assert, While)):
            return _bound(s, fn)
        return s if isinstance(s, TileOp) else None

    return rewrite_stmts(func, fn)


def _bound(s: Stmt, fn: Callable[[Stmt], Stmt | None]) -> Stmt | None:
    """s with its repeated calls bound before it; None where there are none."""
    seen: dict[int, list[tuple[Call, bool, bool]]] = {}
    for e in (s.value,) if isinstance(s, Store) else children(s):
        if isinstance(e, Expr) and called(e):
            _find(e, isinstance(s, While), isinstance(s, For), seen)
    if isinstance(s, Store):
        for i in s.indices:
            if called(i):
                _find(i, False, True, seen)
    repeated = {n: uses for n, uses in seen.items() if len(uses) > 1 or any(inside for _, _, inside in uses)}
    if not repeated:
        return None
    for uses in repeated.values():
        if all(lazy for _, lazy, _ in uses):
            call = uses[0][0]
            raise error("extern-repeated", f"the call of {call.args[0]} would run more than once: its result is an "
                        "index or is used in several places, and it runs only under a condition",
                        found=f"a call of {call.args[0]}", span=call.span or s.span)
    strict = {n: uses[0][0] for n, uses in seen.items() if not all(lazy for _, lazy, _ in uses)}
    return _named(s, strict, fn)


def _named(s: Stmt, calls: dict[int, Call], fn: Callable[[Stmt], Stmt | None]) -> Stmt:
    names = {n: Var("result", c.dtype, span=c.span or s.span) for n, c in calls.items()}

    def put(n: Node, but: int | None = None) -> Node | None:
        number = _number(n)
        return None if number is None or number == but else names.get(number)

    binds: list[Stmt] = []
    for n in sorted(calls):
        binds.append(Bind(names[n], rewrite(calls[n], partial(put, but=n)), span=s.span))
    return seq(*binds, rewrite_stmts(rewrite(s, put), fn), span=s.span)


def _number(n: Node) -> int | None:
    return n.options.number if isinstance(n, Call) and n.op == "call_extern" else None


def _find(e: Expr, lazy: bool, inside: bool, seen: dict[int, list[tuple[Call, bool, bool]]]) -> None:
    """Collect the numbered calls in e. lazy: e may not be evaluated; inside: e is part of an index."""
    n = _number(e)
    if n is not None:
        assert isinstance(e, Call)
        seen.setdefault(n, []).append((e, lazy, inside))
    for k, x in enumerate(c for c in children(e) if isinstance(c, Expr)):
        if called(x):
            waits = isinstance(e, Select) and e.lazy or isinstance(e, Binary) and e.op in ("and", "or")
            _find(x, lazy or waits and k > 0, inside or isinstance(e, (Load, AddressOf)), seen)
