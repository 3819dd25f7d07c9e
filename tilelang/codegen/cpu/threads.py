"""Which statements of a block depend on the thread, so that the rest runs once for the block.

A block runs in one CPU thread.  Statements that use no thread index run once; each statement that does is a loop over
the block's threads, one statement after another (as if a barrier stood between any two, which is one of the allowed
interleavings and the one automatic synchronisation asks for).  Private memory that differs between threads gets one
copy per thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import (
    AddressOf,
    Alloc,
    Binary,
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
    Node,
    Parallel,
    Seq,
    Stmt,
    Store,
    TileOp,
    Var,
    While,
    walk,
)
from tilelang.ir.nodes import node

from .effects import PER_THREAD
from .lanes import BLOCK_VOTES, EXCHANGES, LANE_OPS
from .matrices import MATRIX_CALLS
from .types import unsupported

_PER_LANE = (*LANE_OPS, *MATRIX_CALLS, "in_warp_groups")
_PRIVATE = ("local", "local.var")


@node
class Together(Stmt):
    """body is done once, by the last role of the block that comes; then all go on (roles.py).  key: number of the meeting."""

    body: Stmt
    key: int
    span: Any = None


@node
class Masked(Stmt):
    """body, one simple statement or a run of them, for the threads in which mask holds.

    whole: the other threads have returned, so that barriers and votes of the block are those of these threads.
    left: else, which threads have not returned; None where none may have.
    """

    mask: Expr
    body: Stmt
    whole: bool = False
    left: Expr | None = None
    span: Any = None


def is_private(b: Buffer) -> bool:
    """Whether each thread has its own b."""
    return b.scope_name in _PRIVATE


@dataclass
class Threads:
    """Result of the analysis of one launch.

    count: threads per block.  varying: Vars that differ between threads.  private: storage (data Vars) with one copy a
    thread.  looped: ids of the statements that run as a loop over threads.  indices: the thread indices.
    """

    count: int
    varying: set[Var] = field(default_factory=set)
    private: set[Var] = field(default_factory=set)
    looped: set[int] = field(default_factory=set)
    indices: tuple[Var, ...] = ()

    def varies(self, e: Any) -> bool:
        """Whether an expression (or tuple of them) may differ between threads."""
        if isinstance(e, tuple):
            return any(self.varies(x) for x in e)
        if not isinstance(e, Node):
            return False
        agreed = {id(x) for n in walk(e) if isinstance(n, Call) and n.op in BLOCK_VOTES for x in walk(n)}
        for n in walk(e):
            if id(n) in agreed:
                continue  # one answer for the block, whoever voted how
            if isinstance(n, Var) and n in self.varying or isinstance(n, Buffer) and self.elsewhere(n):
                return True
            if isinstance(n, Load) and n.buffer.data in self.private:
                return True
            if isinstance(n, Call) and (n.op in PER_THREAD or n.op in _PER_LANE):
                return True
        return False

    def elsewhere(self, b: Buffer) -> bool:
        """Whether a buffer is another place for each thread: made of an address, or from an element on, that differs."""
        return b.data in self.varying or any(isinstance(d, Expr) and self.varies(d)
                                             for d in (b.offset, *b.shape, *(b.strides_ or ())))


def analyse_threads(launch: Launch) -> Threads:
    """Find what depends on the thread index.  Raises cpu-unsupported for tile operations under such conditions."""
    out = spread(launch)
    if out.count > 1:
        _mark(out, launch.body)
    return out


def spread(launch: Launch) -> Threads:
    """What depends on the thread index, no statement chosen to be a loop yet."""
    out = Threads(launch.num_threads, set(launch.thread_vars), indices=launch.thread_vars)
    if out.count == 1:
        out.varying.clear()
        return out
    while True:
        before = len(out.varying) + len(out.private)
        _spread(out, launch.body, False)
        if len(out.varying) + len(out.private) == before:
            return out


def _spread(t: Threads, s: Stmt, divergent: bool) -> None:
    """One round of the fixpoint: values that depend on the thread make what they flow into depend on it."""
    match s:
        case Seq():
            for x in s.stmts:
                _spread(t, x, divergent)
                divergent = divergent or returns_in(t, x)
        case Masked():
            _spread(t, s.body, True)
        case Together():
            _spread(t, s.body, divergent)
        case Bind():
            if divergent and not is_unmasked(s.value) or t.varies(s.value):
                t.varying.add(s.var)
        case Alloc():
            if s.init is not None and t.varies(s.init):
                t.private.add(s.buffer.data)
        case Store():
            if is_private(s.buffer) and (divergent or t.varies(s.value) or t.varies(s.indices)):
                t.private.add(s.buffer.data)
        case For():
            own = t.varies(s.start) or t.varies(s.extent)
            if own:
                t.varying.add(s.var)
            _spread(t, s.body, divergent or own or _leaves_early(t, s.body) or returns_in(t, s.body))
        case While():
            _spread(t, s.body, divergent or t.varies(s.cond) or _leaves_early(t, s.body) or returns_in(t, s.body))
        case If():
            inner = divergent or t.varies(s.cond)
            _spread(t, s.then, inner)
            if s.orelse is not None:
                _spread(t, s.orelse, inner)
        case Evaluate() if s.call.op in MATRIX_CALLS:
            t.private.update(a.buffer.data for a in s.call.args if isinstance(a, AddressOf) and is_private(a.buffer))
        case TileOp():
            touched = s.accesses()  # type: ignore[attr-defined]
            # what is computed of private memory differs between threads as that memory does
            varied = divergent or t.varies(s) or any(a.region.buffer.data in t.private for a in touched)
            t.private.update(a.region.buffer.data for a in touched if varied and a.writes and is_private(a.region.buffer))
        case _:
            pass  # a Parallel shares its iterations out itself: private storage in it is a temporary of one iteration


def _leaves_early(t: Threads, body: Stmt) -> bool:
    """Whether a break or continue of this loop depends on the thread."""
    def visit(s: Stmt, divergent: bool) -> bool:
        match s:
            case Seq():
                return any(visit(x, divergent) for x in s.stmts)
            case If():
                inner = divergent or t.varies(s.cond)
                return visit(s.then, inner) or (s.orelse is not None and visit(s.orelse, inner))
            case Break() | Continue():
                return divergent
        return False

    return visit(body, False)


def returns_in(t: Threads, s: Stmt) -> bool:
    """Whether only some of the threads may come to a thread_return in s."""
    if not any(isinstance(n, Call) and n.op == "thread_return" for n in walk(s)):
        return False

    def visit(s: Stmt, divergent: bool) -> bool:
        match s:
            case Seq():
                return any(visit(x, divergent) for x in s.stmts)
            case If():
                inner = divergent or t.varies(s.cond)
                return visit(s.then, inner) or (s.orelse is not None and visit(s.orelse, inner))
            case For():
                return visit(s.body, divergent or t.varies((s.start, s.extent)) or _leaves_early(t, s.body))
            case While():
                return visit(s.body, divergent or t.varies(s.cond) or _leaves_early(t, s.body))
            case Evaluate():
                return divergent and s.call.op == "thread_return"
        return False

    return visit(s, False)


def is_unmasked(e: Expr) -> bool:
    """Whether threads that would not have computed a value may do so: it cannot fail, and nothing sees it."""
    for x in walk(e):
        if isinstance(x, Load) and not (is_private(x.buffer) and all(isinstance(i, Const) for i in x.indices)):
            return False
        if isinstance(x, Binary) and x.op in ("floordiv", "floormod", "truncdiv", "truncmod"):
            if not (isinstance(x.b, Const) and x.b.value):
                return False
        if isinstance(x, Call):
            return False
    return True


def _mark(t: Threads, s: Stmt) -> None:
    """Choose the statements that become loops over threads: the largest whose control depends on the thread; leaves."""
    match s:
        case Seq():
            for x in s.stmts:
                _mark(t, x)
        case For():
            if t.varies(s.start) or t.varies(s.extent) or _leaves_early(t, s.body):
                _loop(t, s)
            else:
                _mark(t, s.body)
        case While():
            if t.varies(s.cond) or _leaves_early(t, s.body):
                _loop(t, s)
            else:
                _mark(t, s.body)
        case If():
            if t.varies(s.cond):
                _loop(t, s)
            else:
                _mark(t, s.then)
                if s.orelse is not None:
                    _mark(t, s.orelse)
        case Masked():
            _loop(t, s)
        case Together():
            check_uniform(t, s.body)
        case Bind():
            if s.var in t.varying:
                t.looped.add(id(s))
        case Alloc():
            if s.buffer.data in t.private:
                t.looped.add(id(s))
        case Store():
            if t.varies((s.value, s.indices, s.buffer)) or s.buffer.data in t.private:
                t.looped.add(id(s))
        case Evaluate():
            if t.varies(s.call):
                t.looped.add(id(s))
        case TileOp():
            if any(a.region.buffer.data in t.private for a in s.accesses()):  # type: ignore[attr-defined]
                t.looped.add(id(s))  # on private memory: every thread for itself
            else:
                check_uniform(t, s)
        case Parallel():
            check_uniform(t, s)


def _loop(t: Threads, s: Stmt) -> None:
    """A statement whose control depends on the thread runs thread after thread: refuse what that would break."""
    by_hand = s.body if isinstance(s, Masked) and isinstance(s.body, TileOp) and s.body.attr("by_hand") else None
    if by_hand is not None:  # one of the threads does it
        check_uniform(t, by_hand)
    exchange = isinstance(s, Masked) and isinstance(s.body, (Bind, Store, Evaluate))  # of the mask's threads
    alone = s.body if isinstance(s, Masked) and isinstance(s.body, TileOp) and of_each(s.body) else None
    for n in walk(s):
        if isinstance(n, Parallel) or isinstance(n, TileOp) and not own_work(n) and n is not by_hand and n is not alone:
            raise unsupported("a tile operation or T.Parallel under a condition that depends on the thread",
                              span=n.span, hint="move it out of the branch: all threads of the block take part in it")
        if isinstance(n, Call) and (n.op in (*EXCHANGES, *MATRIX_CALLS) and not exchange or n.op in BLOCK_VOTES and not (
                exchange and s.whole)):  # type: ignore[attr-defined]
            raise unsupported(f"{n.op} under a condition or loop that depends on the thread", span=n.span or s.span,
                              hint="all threads that it takes must reach it: move it out of the branch or loop")
    if not exchange and meets_itself([s]):
        raise unsupported("reading and writing one shared buffer at different places inside a branch or loop that "
                          "depends on the thread", span=s.span,
                          hint="split the branch into one that writes and one that reads")
    t.looped.add(id(s))


def own_work(s: TileOp) -> bool:
    """Whether a tile operation is every thread's own: between its private arrays, and global memory."""
    buffers = [a.region.buffer for a in s.accesses()]  # type: ignore[attr-defined]
    return any(map(is_private, buffers)) and all(is_private(b) or b.scope() == "global" for b in buffers)


def of_each(s: TileOp) -> bool:
    """Whether each thread does a tile operation for itself, shared memory included."""
    return any(is_private(a.region.buffer) for a in s.accesses())  # type: ignore[attr-defined]


Places = dict[Var, set[tuple[Expr, ...]]]


def places_of(stmts: list[Stmt]) -> tuple[Places, Places]:
    """Where the statements read and where they write shared memory, by storage."""
    read: Places = {}
    written: Places = {}
    for n in (n for s in stmts for n in walk(s)):
        if isinstance(n, Load) and n.buffer.scope().startswith("shared"):
            read.setdefault(n.buffer.data, set()).add(n.indices)
        elif isinstance(n, Store) and n.buffer.scope().startswith("shared"):
            written.setdefault(n.buffer.data, set()).add(n.indices)
    return read, written


def meets_itself(stmts: list[Stmt]) -> bool:
    """Whether the statements write a shared buffer that they read at another place: threads may see each other's writes."""
    read, written = places_of(stmts)
    return any(len(read[data] | written[data]) > 1 for data in read.keys() & written.keys())


def check_uniform(t: Threads, s: Stmt) -> None:
    """Iterations belong to no thread here; only a printed line may name one (it says thread 0).  What check_private has let
    through is one value for all threads at this place, or an iteration's own: that of the first thread stands for it."""
    by_hand = isinstance(s, TileOp) and s.attr("by_hand")  # type: ignore[attr-defined]
    prints = {id(v) for n in walk(s) if isinstance(n, Call) and n.op == "printf" for v in walk(n)}
    for n in walk(s):
        if isinstance(n, Var) and n in (t.varying if by_hand else t.varying & set(t.indices)) and id(n) not in prints:
            raise unsupported(f"the thread-dependent value {n.name} inside a tile operation or T.Parallel", span=s.span,
                              hint="iterations of T.Parallel have no thread of their own here")
        if by_hand and isinstance(n, Buffer) and n.data in t.private:
            raise unsupported(f"per-thread buffer {n.name} inside a tile operation or T.Parallel", span=s.span,
                              hint="use a fragment, whose elements are shared out over the threads")
