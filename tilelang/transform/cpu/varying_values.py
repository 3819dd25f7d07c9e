"""Which values of a launch differ between threads, and which jumps only some of the threads take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, Expr, For, If, Launch, Load, Seq, Stmt, Store,
                         TileOp, Var, While, controls, inner, walk, GLOBAL)
from tilelang.target.cpu_launch import Masked, OncePerBlock, ThreadValues, is_private
from tilelang.target.thread_calls import MATRIX_CALLS

from ..analysis.divergence import parted
from ..analysis.effects import cannot_fail


def find_varying_values(launch: Launch) -> ThreadValues:
    """The least sets of variables and private buffers that are closed under data and control flow from the thread indices.

        tx = thread index                    varying
        i = tx * 4                           varying: computed from tx
        n = B[0]                             the same for all threads
        if i < n: r[0] = 1                   r private: stored under a divergent condition
    """
    if launch.num_threads == 1:
        return ThreadValues(1, launch.thread_vars, frozenset(), frozenset())
    varying, private = set(launch.thread_vars), set[Var]()
    flow, before = _Flow(ThreadValues(launch.num_threads, launch.thread_vars, varying, private), varying, private), 0
    while len(varying) + len(private) > before:
        before = len(varying) + len(private)
        flow.visit(launch.body, False)
    return ThreadValues(launch.num_threads, launch.thread_vars, frozenset(varying), frozenset(private),
                        _units(launch.body, private))


def _units(body: Stmt, private: set[Var]) -> dict[Var, int]:
    """Least common multiple of the element sizes of all views, for the private storage whose views differ in that."""
    sizes: dict[Var, set[int]] = {}
    for b in walk(body, Buffer):
        if b.data in private:
            sizes.setdefault(b.data, set()).add(b.dtype.bytes)
    return {v: math.lcm(*n) for v, n in sizes.items() if len(n) > 1}


class _Flow:
    """One step of the fixpoint.  known: a view of the two sets while they grow."""

    def __init__(self, known: ThreadValues, varying: set[Var], private: set[Var]) -> None:
        self.known, self.varying, self.private = known, varying, private

    def visit(self, s: Stmt, divergent: bool) -> None:
        """Add what s makes vary.  divergent: only some of the threads may execute s."""
        t = self.known
        match s:
            case Seq():
                for x in s.stmts:
                    self.visit(x, divergent)
                    divergent = divergent or some_return(t, x)
            case Masked():
                self.visit(s.body, True)
            case OncePerBlock():
                self.visit(s.body, divergent)
            case Bind():
                if divergent and not is_speculatable(s.value) or t.varies(s.value):
                    self.varying.add(s.var)
            case Alloc():
                if s.init is not None and t.varies(s.init):
                    self.private.add(s.buffer.data)
            case Store():
                if is_private(s.buffer) and (divergent or t.varies(s.value) or t.varies(s.indices)):
                    self.private.add(s.buffer.data)
            case If() | For() | While():
                if isinstance(s, For) and t.varies(controls(s)):
                    self.varying.add(s.var)
                divergent = divergent or runs_unevenly(t, s) or not isinstance(s, If) and some_return(t, s.body)
                for x in inner(s):
                    self.visit(x, divergent)
            case Evaluate() if s.call.op in MATRIX_CALLS:
                self.private.update(a.buffer.data for a in s.call.args if isinstance(a, AddressOf) and is_private(a.buffer))
            case TileOp():
                self.tile_op(s, divergent)
            case _:
                pass  # iterations of a Parallel belong to no thread: private storage in it is a temporary of one iteration

    def tile_op(self, s: TileOp, divergent: bool) -> None:
        """What is computed from private memory differs between threads as that memory does."""
        touched = s.accesses()  # type: ignore[attr-defined]
        if divergent or self.known.varies(s) or any(a.region.buffer.data in self.private for a in touched):
            self.private.update(a.region.buffer.data for a in touched if a.writes and is_private(a.region.buffer))


def some_exit_early(varies: Callable[[Any], bool], body: Stmt) -> bool:
    """Whether a break or continue of the loop with this body is taken by some of the threads alone."""
    return any(not isinstance(x, Evaluate) for x in parted(body, varies))


def runs_unevenly(t: ThreadValues, s: If | For | While) -> bool:
    """Whether threads may take different ways of a branch, or leave a loop in different iterations."""
    return t.varies(controls(s)) or not isinstance(s, If) and some_exit_early(t.varies, s.body)


def some_return(t: ThreadValues, s: Stmt) -> bool:
    """Whether some of the threads alone may execute a thread_return in s."""
    return any(n.op == "thread_return" for n in walk(s, Call)) and any(
        isinstance(x, Evaluate) for x in parted(s, t.varies, loops=True))


def is_speculatable(e: Expr) -> bool:
    """Whether threads that need not compute a value may do so: it cannot fail, and nothing observes it."""
    return cannot_fail(e, lambda x: is_private(x.buffer) and all(isinstance(i, Const) for i in x.indices))


def is_thread_work(s: TileOp) -> bool:
    """Whether a tile operation is every thread's own: between its private arrays, and global memory."""
    buffers = [a.region.buffer for a in s.accesses()]  # type: ignore[attr-defined]
    return any(map(is_private, buffers)) and all(is_private(b) or b.scope() == GLOBAL for b in buffers)


def touches_private(s: TileOp) -> bool:
    """Whether each thread runs a tile operation for itself: one of its operands is private memory."""
    return any(is_private(a.region.buffer) for a in s.accesses())  # type: ignore[attr-defined]


def rereads_shared(s: Stmt) -> bool:
    """Whether s writes a shared buffer and accesses it at another place too: threads may see each other's writes."""
    read: dict[Var, set[tuple[Expr, ...]]] = {}
    written: dict[Var, set[tuple[Expr, ...]]] = {}
    for n in walk(s, Load, Store):
        if n.buffer.scope().startswith("shared"):
            (read if isinstance(n, Load) else written).setdefault(n.buffer.data, set()).add(n.indices)
    return any(len(read[data] | written[data]) > 1 for data in read.keys() & written.keys())
