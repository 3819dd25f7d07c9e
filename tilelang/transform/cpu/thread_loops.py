"""Statements that depend on the thread become loops over the threads of a block; the rest runs once for the block."""

from __future__ import annotations

from tilelang.ir import (Alloc, Bind, Buffer, Call, Evaluate, For, If, Parallel, Seq, Stmt, Store, TileOp, Var, While, walk,
                         with_inner)
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import Collective, Masked, OncePerBlock, ThreadLoop, ThreadValues
from tilelang.target.thread_calls import BLOCK_VOTES, EXCHANGES, MATRIX_CALLS
from tilelang.ops import Copy

from .varying_values import is_thread_work, rereads_shared, runs_unevenly, touches_private

_NAMED_BARRIERS = ("named_barrier", "named_barrier_arrive")


def loop_over_threads(body: Stmt, t: ThreadValues) -> Stmt:
    """The body of a launch with the largest statements whose control depends on the thread, and the simple ones that do, as
    loops over threads.

        n = B[0]                             n = B[0]
        s[tx] = A[n, tx]                     for each thread: s[tx] = A[n, tx]
        sync_threads()                 ->    sync_threads()
        if tx < n:                           for each thread:
            B[tx] = s[n - tx]                    if tx < n: B[tx] = s[n - tx]
        mma(c, a, b)                         collective: mma(c, a, b)

    Keeps: all threads have run a statement before one of them begins the next one.
    Raises cpu-unsupported for what threads do together under a condition or in a loop that depends on the thread.
    """
    return body if t.count == 1 else _visit(t, body)


def _visit(t: ThreadValues, s: Stmt) -> Stmt:
    match s:
        case For() | While() | If() if runs_unevenly(t, s):
            return _divergent(t, s)
        case For() | While() | If() | Seq():
            return with_inner(s, lambda x: _visit(t, x))  # type: ignore[no-any-return]
        case Masked():
            return _divergent(t, s)
        case OncePerBlock():
            check_uniform(t, s.body)
            return s
        case Evaluate() if s.call.op in MATRIX_CALLS:
            return Collective(s, span=s.span)
        case Bind():
            own = s.var in t.varying
        case Alloc():
            own = s.buffer.data in t.private
        case Store():
            own = t.varies((s.value, s.indices, s.buffer)) or s.buffer.data in t.private
        case Evaluate():
            own = t.varies(s.call)
        case TileOp() if any(a.region.buffer.data in t.private for a in s.accesses()):  # type: ignore[attr-defined]
            own = True
        case TileOp() | Parallel():
            check_uniform(t, s)
            return s
        case _:
            return s
    return ThreadLoop(s, span=s.span) if own else s


def _divergent(t: ThreadValues, s: Stmt) -> Stmt:
    """A statement whose control depends on the thread, run thread after thread.  Raises where that would change its result."""
    inner = s.body if isinstance(s, Masked) else None
    by_hand = inner if isinstance(inner, Copy) and inner.plan.by_hand else None
    if by_hand is not None:  # one of the threads starts it
        check_uniform(t, by_hand)
    exchange = isinstance(inner, (Bind, Store, Evaluate))  # of the mask's threads
    alone = inner if isinstance(inner, TileOp) and touches_private(inner) else None
    for n in walk(s):
        if isinstance(n, Parallel) or isinstance(n, TileOp) and not is_thread_work(n) and n is not by_hand and n is not alone:
            raise unsupported("a tile operation or T.Parallel under a condition that depends on the thread",
                              span=n.span, hint="move it out of the branch: all threads of the block take part in it")
        if isinstance(n, Call) and (n.op in (*EXCHANGES, *MATRIX_CALLS) and not exchange or n.op in BLOCK_VOTES and not (
                exchange and s.only_returned_absent)):  # type: ignore[attr-defined]
            raise unsupported(f"{n.op} under a condition or loop that depends on the thread", span=n.span or s.span,
                              hint="all threads that it takes must reach it: move it out of the branch or loop")
    if not exchange and rereads_shared(s):
        raise unsupported("reading and writing one shared buffer at different places inside a branch or loop that "
                          "depends on the thread", span=s.span,
                          hint="split the branch into one that writes and one that reads")
    if isinstance(s, Masked) and (by_hand is not None or _is_collective(s.body)):
        return Collective(s, span=s.span)
    return ThreadLoop(s, span=s.span)


def _is_collective(s: Stmt) -> bool:
    """Whether the threads of a mask run a simple statement as one."""
    if isinstance(s, Evaluate) and s.call.op in (*MATRIX_CALLS, *_NAMED_BARRIERS):
        return True
    return any(n.op in (*EXCHANGES, *BLOCK_VOTES) for n in walk(s, Call))


def check_uniform(t: ThreadValues, s: Stmt) -> None:
    """Raises cpu-unsupported where iterations of s, which belong to no thread, name a thread; a printed line may (thread 0).

    Other values that differ between threads have passed check_private: they are one value for all threads at this place, or an
    iteration's own, and that of the first thread stands for it.
    """
    by_hand = isinstance(s, Copy) and s.plan.by_hand
    named = t.varying if by_hand else t.varying & set(t.indices)
    prints = {id(v) for n in walk(s, Call) if n.op == "printf" for v in walk(n)}
    for n in walk(s, Var, Buffer):
        if isinstance(n, Var) and n in named and id(n) not in prints:
            raise unsupported(f"the thread-dependent value {n.name} inside a tile operation or T.Parallel", span=s.span,
                              hint="iterations of T.Parallel belong to no thread here")
        if by_hand and isinstance(n, Buffer) and n.data in t.private:
            raise unsupported(f"per-thread buffer {n.name} inside a tile operation or T.Parallel", span=s.span,
                              hint="use a fragment, whose elements are distributed over the threads")
