"""Threads that return: what follows stands under the condition that the thread is left.

    if c: return; B      p = c; if not p: B
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (
    Alloc,
    Bind,
    Buffer,
    Call,
    Const,
    Evaluate,
    Expr,
    If,
    Launch,
    Load,
    Seq,
    Stmt,
    Store,
    const,
    fresh,
    load,
    replace,
    seq,
    substitute,
    unary,
    walk,
)

from .threads import Threads, spread


def straighten(launch: Launch) -> Launch:
    """The launch without returns; those that cannot be written so stay, and are refused later."""
    if launch.num_threads == 1 or not any(isinstance(n, Call) and n.op == "thread_return" for n in walk(launch.body)):
        return launch
    body = _returns(spread(launch), launch.body)
    return launch if body is launch.body else replace(launch, body=body)


def _is_return(s: Stmt) -> bool:
    return isinstance(s, Evaluate) and s.call.op == "thread_return"


def _statements(s: Stmt) -> list[Stmt]:
    return [y for x in s.stmts for y in _statements(x)] if isinstance(s, Seq) else [s]


def _returns(t: Threads, s: Stmt) -> Stmt:
    """Statements behind a return of some threads, under the condition that the thread is left.  Loops are not entered."""
    stmts = _statements(s)
    for k, x in enumerate(stmts):
        if not (isinstance(x, If) and any(isinstance(n, Evaluate) and _is_return(n) for n in walk(x))):
            continue
        if not t.varies(x.cond):
            done = replace(x, then=_returns(t, x.then), orelse=None if x.orelse is None else _returns(t, x.orelse))
            return seq(*stmts[:k], done, *_statements(_returns(t, seq(*stmts[k + 1:])))) if stmts[k + 1:] else \
                seq(*stmts[:k], done)
        then = _statements(x.then)
        if x.orelse is not None or not _is_return(then[-1]) or any(_is_return(y) for y in then[:-1]):
            return s
        gone = fresh("gone", "bool")
        out: list[Stmt] = [*stmts[:k], Bind(gone, x.cond, span=x.span)]
        if then[:-1]:
            out.append(If(gone, seq(*then[:-1]), span=x.span))
        if stmts[k + 1:]:
            out += _after(stmts[k + 1:], unary("not", gone), t)
        return seq(*out)
    return s


def _after(rest: list[Stmt], left: Expr, t: Threads) -> list[Stmt]:
    """The statements, for the threads that are left."""
    inner = _statements(_returns(t, seq(*rest)))
    return _under(inner, left)


def _under(stmts: list[Stmt], pred: Expr) -> list[Stmt]:
    """The statements, each for the threads where pred holds."""
    out: list[Stmt] = []
    todo = list(stmts)
    while todo:
        s = todo.pop(0)
        if isinstance(s, Alloc):
            out.append(s if s.init is None else replace(s, init=None))
            if s.init is not None:
                todo.insert(0, Store(s.buffer, (const(0),), s.init, span=s.span))
            continue
        if isinstance(s, Bind):
            if _pure(s.value):
                out.append(s)
            else:
                kept = Buffer(s.var.name, (1,), s.var.dtype, "local.var", span=s.span)
                out.append(Alloc(kept, span=s.span))
                todo = [Store(kept, (const(0),), s.value, span=s.span),
                        *(substitute(x, {s.var: load(kept, (0,))}) for x in todo)]
            continue
        out.append(If(pred, s, span=s.span))
    return out


def _pure(e: Any) -> bool:
    """Whether a value can be computed by threads that would not have computed it."""
    for x in walk(e):
        if isinstance(x, (Load, Call)):
            return False
        if getattr(x, "op", None) in ("floordiv", "floormod", "truncdiv", "truncmod"):
            if not (isinstance(x.b, Const) and x.b.value):  # type: ignore[attr-defined]
                return False
    return True


__all__ = ["straighten"]
