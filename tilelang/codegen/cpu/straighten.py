"""Branches that depend on the thread, cut where their threads would have to wait for each other.

A block runs a statement at a time, each for all its threads (threads.py).  A branch taken by some threads is one statement
of that kind, so what follows a write of shared memory inside it would see the writes of earlier threads only.  It becomes
several branches under one remembered condition:

    if c: A; B           p = c; if p: A; if p: B
    if c: return; B      p = not c; if p: B
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (
    BOOL,
    Alloc,
    Bind,
    Break,
    Buffer,
    Call,
    Const,
    Continue,
    Evaluate,
    Expr,
    For,
    If,
    Launch,
    Load,
    Seq,
    Stmt,
    Store,
    While,
    const,
    fresh,
    load,
    replace,
    seq,
    substitute,
    unary,
    walk,
)

from .threads import Threads, meets_itself, spread


def straighten(launch: Launch) -> Launch:
    """The launch with branches cut as said above; those that cannot be cut stay, and are refused later."""
    if launch.num_threads == 1 or not any(isinstance(n, (If, Call)) for n in walk(launch.body)):
        return launch
    t = spread(launch)
    body = _returns(t, launch.body)
    if body is not launch.body:
        launch = replace(launch, body=body)
        t = spread(launch)
    body = _cut(t, launch.body)
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
    return _under(t, inner, left, True)


def _cut(t: Threads, s: Stmt) -> Stmt:
    """Cut the branches in s whose threads meet in shared memory."""
    match s:
        case Seq():
            new = [_cut(t, x) for x in s.stmts]
            return s if all(a is b for a, b in zip(new, s.stmts)) else seq(*new)
        case For() | While():
            body = _cut(t, s.body)
            return s if body is s.body else replace(s, body=body)
        case If():
            if not t.varies(s.cond):
                then, orelse = _cut(t, s.then), s.orelse and _cut(t, s.orelse)
                return s if then is s.then and orelse is s.orelse else replace(s, then=then, orelse=orelse)
            if meets_itself([s]):
                return seq(*_branch(t, s, None))
    return s


def _branch(t: Threads, s: If, outer: Expr | None) -> list[Stmt]:
    """An If, cut; outer: the condition that stands around it."""
    out: list[Stmt] = []
    if outer is None:
        taken: Expr = fresh("taken", "bool")
        out.append(Bind(taken, s.cond, span=s.span))  # type: ignore[arg-type]
        other: Expr = unary("not", taken)
    else:  # the condition may be read only by threads that come here
        kept = [Buffer(name, (1,), BOOL, "local.var", span=s.span) for name in ("taken", "other")]
        zero = (const(0),)
        out += [Alloc(b, span=s.span) for b in kept]
        out += [Store(b, zero, Const(False, b.dtype), span=s.span) for b in kept]
        out.append(If(outer, seq(Store(kept[0], zero, s.cond, span=s.span),
                                 Store(kept[1], zero, unary("not", load(kept[0], (0,))), span=s.span)), span=s.span))
        taken, other = load(kept[0], (0,)), load(kept[1], (0,))
    out += _under(t, _statements(s.then), taken)
    if s.orelse is not None:
        out += _under(t, _statements(s.orelse), other)
    return out


def _under(t: Threads, stmts: list[Stmt], pred: Expr, split: bool = False) -> list[Stmt]:
    """The statements, each for the threads where pred holds.  split: also those that do not meet stand apart."""
    out: list[Stmt] = []
    run: list[Stmt] = []

    def close() -> None:
        if run:
            out.append(If(pred, seq(*run), span=run[0].span))
            run.clear()

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
                close()
                out.append(s)
            else:
                kept = Buffer(s.var.name, (1,), s.var.dtype, "local.var", span=s.span)
                out.append(Alloc(kept, span=s.span))
                todo = [Store(kept, (const(0),), s.value, span=s.span),
                        *(substitute(x, {s.var: load(kept, (0,))}) for x in todo)]
            continue
        alone = meets_itself([s])
        if run and (split or alone or meets_itself([*run, s])):
            close()
        if alone and isinstance(s, If):
            out += _branch(t, s, pred)
        elif alone and isinstance(s, For) and not _own_way(t, s):
            out.append(replace(s, body=seq(*_under(t, _statements(s.body), pred))))
        else:
            run.append(s)
    close()
    return out


def _own_way(t: Threads, s: For) -> bool:
    """Whether threads may run the loop differently often, or leave it."""
    if t.varies(s.start) or t.varies(s.extent) or not (_pure(s.start) and _pure(s.extent)):
        return True
    return any(isinstance(n, (Break, Continue)) for n in walk(s.body))


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
