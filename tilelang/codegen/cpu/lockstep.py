"""Statements whose threads exchange values through shared memory, so that running thread after thread is right.

A loop over threads runs each thread's whole statement before the next thread's.  That is not what a block means where
the statement reads places of a shared buffer that other threads write in it:

    s[tx] = s[63 - tx]                       t = s[63 - tx]; s[tx] = t
    if tx < w: s[tx] = s[tx] + s[tx + w]     m = tx < w; t = s[tx] + s[tx + w] if m else 0; if m: s[tx] = t

The right-hand forms are several statements, each a loop over threads of its own.  What cannot be taken apart (loops of
another length for each thread, break, while) stays, and threads.py refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tilelang.ir import (
    Alloc,
    Binary,
    Bind,
    Break,
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
    Var,
    While,
    const,
    logical,
    select,
    seq,
    unary,
    walk,
)

from .threads import Threads, is_private, meets_itself, places_of, spread


class _Whole(Exception):
    """A statement under the condition cannot be taken apart."""


def in_lockstep(launch: Launch) -> Launch:
    """The launch with such statements taken apart; itself when it has none."""
    threads = spread(launch)
    if threads.count == 1:
        return launch
    names = iter(range(1 << 30))

    def visit(s: Stmt) -> Stmt:
        match s:
            case Seq():
                return seq(*map(visit, s.stmts), span=s.span)
            case If() if threads.varies(s.cond):
                if not _exchanges(s, threads, launch):
                    return s
                try:
                    return seq(*_masked(s, const(True), threads, names))
                except _Whole:
                    return s
            case If():
                orelse = None if s.orelse is None else visit(s.orelse)
                return replace(s, then=visit(s.then), orelse=orelse)
            case For() if not threads.varies(s.start) and not threads.varies(s.extent):
                return replace(s, body=visit(s.body))
            case While() if not threads.varies(s.cond):
                return replace(s, body=visit(s.body))
            case Store() if threads.varies(s.indices) and meets_itself([s]):
                value = Var(f"moved_{next(names)}", s.value.dtype, span=s.span)
                return seq(Bind(value, s.value, span=s.span), replace(s, value=value))
        return s

    body = visit(launch.body)
    return launch if body is launch.body else replace(launch, body=body)


def _exchanges(s: If, threads: Threads, launch: Launch) -> bool:
    """Whether a thread may read in the branch what another thread writes there."""
    if meets_itself([s]):
        return True
    moving = {n.var for n in walk(s) if isinstance(n, For)}
    own = launch.thread_vars[0] if launch.threads[1:] == (1, 1) else None
    read, written = places_of([s])
    for data in read.keys() & written.keys():
        for place in written[data]:
            if not any(i is own for i in place) and any(isinstance(n, Var) and n in moving for i in place for n in walk(i)):
                return True  # the loop moves threads over each other's places
    return False


def _masked(s: Stmt, mask: Expr, threads: Threads, names: Iterator[int]) -> Iterable[Stmt]:
    """The statements of s, each for the threads of the mask alone."""
    match s:
        case Seq():
            for x in s.stmts:
                yield from _masked(x, mask, threads, names)
        case If():
            yes = Var(f"active_{next(names)}", const(True).dtype, span=s.span)
            yield Bind(yes, logical("and", mask, s.cond), span=s.span)
            yield from _masked(s.then, yes, threads, names)
            if s.orelse is not None:
                no = Var(f"active_{next(names)}", yes.dtype, span=s.span)
                yield Bind(no, logical("and", mask, unary("not", yes)), span=s.span)
                yield from _masked(s.orelse, no, threads, names)
        case For():
            if threads.varies((s.start, s.extent)) or not all(_harmless(n) for e in (s.start, s.extent) for n in walk(e)):
                raise _Whole
            yield replace(s, body=seq(*_masked(s.body, mask, threads, names)))
        case Bind():
            yield Bind(s.var, _guarded(mask, s.value), span=s.span)
        case Alloc():
            yield s if s.init is None else replace(s, init=_guarded(mask, s.init))
        case Store():
            if meets_itself([s]):
                value = Var(f"moved_{next(names)}", s.value.dtype, span=s.span)
                yield Bind(value, _guarded(mask, s.value), span=s.span)
                s = replace(s, value=value)
            yield If(mask, s, None, span=s.span)
        case Break() | Continue() | While():
            raise _Whole
        case Evaluate() if s.call.op != "thread_return":
            yield If(mask, s, None, span=s.span)
        case _:
            raise _Whole


def _harmless(n: Any) -> bool:
    """Whether a bound may be evaluated although no thread is to run the loop."""
    if isinstance(n, Load):
        return is_private(n.buffer) and all(isinstance(i, Const) for i in n.indices)
    if isinstance(n, Binary) and n.op in ("floordiv", "floormod", "truncdiv", "truncmod"):
        return isinstance(n.b, Const)
    return not isinstance(n, Call)


def _guarded(mask: Expr, value: Expr) -> Expr:
    if value.dtype.is_handle or value.dtype.lanes > 1:
        raise _Whole
    return select(mask, value, Const(0.0 if value.dtype.is_float else False if value.dtype.is_bool else 0, value.dtype))


__all__ = ["in_lockstep"]
