"""Code that only some threads run, taken apart into statements for the threads of a mask.

A loop over threads runs each thread's whole statement before the next thread's.  That is not what a block means where
threads meet in the statement: they read what others of the branch write, exchange values between lanes, or return while
the others go on to a barrier.  Such branches and loops become statements in a row, each for the threads of a mask:

    s[tx] = s[63 - tx]                       t = s[63 - tx]; s[tx] = t
    if c: A                                  m = c; A for the threads of m
    else: B                                  n = not c; B for the threads of n
    if c: return                             m = c; live = false for the threads of m
    B                                        B for the threads of live
    while c: A (break under a condition)     m = true; go = 1
                                             while go: { m = c for the threads of m; go = any of the block in m;
                                                         if go: A for the threads of m; break: m = false }

So the threads of a block stay together, a statement at a time.  A loop of another length for each thread in which they
meet in shared memory would need a barrier that not all threads reach: it stays whole, and threads.py refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilelang.ir import (
    AddressOf,
    Alloc,
    Bind,
    Break,
    Buffer,
    Call,
    Continue,
    Evaluate,
    Expr,
    For,
    If,
    Launch,
    Load,
    Parallel,
    Seq,
    Stmt,
    Store,
    TileOp,
    Var,
    While,
    call,
    const,
    dtype,
    load,
    logical,
    replace,
    select,
    seq,
    unary,
    walk,
)

from .crossings import Crossings
from .lanes import BLOCK_VOTES, EXCHANGES
from .matrices import MATRIX_CALLS
from .threads import Masked, Threads, is_private, is_unmasked, meets_itself, own_work, returns_in, spread

_BARRIERS = ("sync_threads", "named_barrier", "named_barrier_arrive", "role_meet", "sync_grid", "cluster_arrive",
             "cluster_wait", "cluster_sync", "cp_async_commit", "cp_async_wait")
_MEETINGS = {*EXCHANGES, *MATRIX_CALLS, *BLOCK_VOTES, *_BARRIERS, "thread_return", "mbarrier_wait"}
_ZERO = (const(0),)


@dataclass(frozen=True)
class Mask:
    """A bool of each thread, and the mask it is part of.  whole: only threads that returned are not in it."""

    buffer: Buffer
    outer: Mask | None
    whole: bool = False

    @property
    def on(self) -> Expr:
        return load(self.buffer, _ZERO)

    def clear(self, span: Any) -> Stmt:
        return Store(self.buffer, _ZERO, const(False), span=span)


@dataclass(frozen=True)
class Leave:
    """Where the threads of a mask go: the masks that a break, a continue leaves behind (None: a jump of all)."""

    on_break: Mask | None = None
    on_continue: Mask | None = None


def masked(launch: Launch) -> Launch:
    """The launch with the statements taken apart in which threads meet; itself when it has none."""
    threads = spread(launch)
    if threads.count == 1:
        return launch
    work = _Masks(launch, threads)
    body = seq(*work.launch_body())
    return launch if not work.changed else replace(launch, body=body)


class _Masks:
    def __init__(self, launch: Launch, threads: Threads) -> None:
        self.launch, self.t = launch, threads
        self.changed = False
        self.places = Crossings(launch, threads)
        self.root: Mask | None = None  # threads that have not returned, from the first statement on that may return

    # ---- small pieces -----------------------------------------------------------------------------------------------

    def variable(self, name: str, dt: Any, init: Any = None, span: Any = None) -> tuple[Buffer, Stmt]:
        self.changed = True
        b = Buffer(name, (1,), dtype(dt), "local.var", span=span)
        return b, Alloc(b, None if init is None else init, span=span)

    def mask(self, name: str, outer: Mask | None, init: Any, span: Any) -> tuple[Mask, Stmt]:
        b, made = self.variable(name, "bool", init, span)
        return Mask(b, outer), made

    def put(self, s: Stmt, m: Mask | None) -> Stmt:
        """s for the threads of a mask."""
        if m is None:
            return s
        self.changed = True
        return Masked(m.on, s, m.whole, None if m.whole or self.root is None else self.root.on, span=s.span)

    # ---- what has to be taken apart -----------------------------------------------------------------------------------

    def meets(self, s: Stmt, divergent: bool) -> bool:
        """Whether threads meet in s, so that one thread's whole s cannot run before the next one's."""
        for n in walk(s):
            if isinstance(n, Call) and n.op in _MEETINGS:
                return True
            if isinstance(n, Parallel) or isinstance(n, TileOp) and not own_work(n):
                return True
        return meets_itself([s]) or self.crosses(s, divergent)

    def crosses(self, s: Stmt, divergent: bool) -> bool:
        """Whether threads may touch each other's places in a part of s that a thread would run whole before the next."""
        if divergent or isinstance(s, (If, For, While)) and (self._divergent(s) or not isinstance(s, If) and bool(
                self.jumps(s.body))):
            return self.places.crosses(s)
        if isinstance(s, Store):
            return self._overwrites(s)
        if isinstance(s, Evaluate):
            return self._updates(s)
        inside = s.stmts if isinstance(s, Seq) else (s.then, s.orelse) if isinstance(s, If) else (
            s.body,) if isinstance(s, (For, While)) else ()
        return any(self.crosses(x, False) for x in inside if x is not None)

    def _overwrites(self, s: Store) -> bool:
        """Whether threads are to read all that the value of a store needs before one of them stores."""
        return not is_private(s.buffer) and self.t.varies((s.indices, s.value)) and (
            meets_itself([s]) or self.places.overwrites(s, s.buffer.data))

    def _updates(self, s: Stmt) -> bool:
        """The same of an atomic update whose result is not used."""
        if not isinstance(s, Evaluate) or not s.call.op.startswith("atomic_") or len(s.call.args) < 2:
            return False
        place, value = s.call.args[:2]
        return isinstance(place, AddressOf) and not is_private(place.buffer) and any(
            isinstance(n, Load) and n.buffer.data is place.buffer.data for n in walk(value)
        ) and self.places.overwrites(s, place.buffer.data)

    def stays(self, s: Stmt) -> bool:
        """Whether a loop of another length for each thread must stay whole: threads meet in shared memory in it."""
        return meets_itself([s])

    def jumps(self, body: Stmt, divergent: bool = False) -> set[type]:
        """Break and Continue of this loop that only some of the threads come to."""
        match body:
            case Seq():
                return set().union(*(self.jumps(x, divergent) for x in body.stmts))
            case If():
                inner = divergent or self.t.varies(body.cond)
                return self.jumps(body.then, inner) | (self.jumps(body.orelse, inner) if body.orelse is not None else set())
            case Break() | Continue():
                return {type(body)} if divergent else set()
        return set()

    # ---- statements -----------------------------------------------------------------------------------------------------

    def launch_body(self) -> Iterator[Stmt]:
        if returns_in(self.t, self.launch.body):
            buffer, made = self.variable("live", "bool", const(True), self.launch.span)
            self.root = Mask(buffer, None, whole=True)
            yield made
        yield from self.seq(self.launch.body, None, Leave())

    def seq(self, s: Stmt, m: Mask | None, leave: Leave) -> Iterator[Stmt]:
        """The statements of s, for the threads of m."""
        for x in s.stmts if isinstance(s, Seq) else (s,):
            if isinstance(x, Seq):
                inner = list(self.seq(x, m, leave))
                yield from inner
            else:
                yield from self.stmt(x, m, leave)
            if m is None and self.root is not None and returns_in(self.t, x):
                m = self.root

    def stmt(self, s: Stmt, m: Mask | None, leave: Leave) -> Iterator[Stmt]:
        if m is None and self.root is not None and isinstance(s, (For, While)) and returns_in(self.t, s):
            m = self.root  # threads that returned in one turn are missing in the next
        divergent = isinstance(s, (If, For, While)) and self._divergent(s)
        if isinstance(s, (If, For, While)) and (
                self.meets(s, divergent or m is not None) or m is not None and self._leaves(s)):
            if divergent and isinstance(s, (For, While)) and self.stays(s):
                yield self.put(s, m)
            elif isinstance(s, If):
                yield from self.branch(s, m, leave)
            elif isinstance(s, For):
                yield from self.loop(s, m)
            else:
                yield from self.while_(s, m)
            return
        match s:
            case Break() | Continue():
                target = leave.on_break if isinstance(s, Break) else leave.on_continue
                yield s if target is None or m is None else self.jump(m, target, s.span)
            case Evaluate() if s.call.op == "thread_return":
                yield s if m is None or self.root is None else self.jump(m, self.root, s.span)
            case Evaluate() if s.call.op in _BARRIERS and m is not None and m.whole:
                yield s  # threads that returned are not waited for
            case Store() if self._overwrites(s):
                self.changed = True
                value = Var(f"moved_{s.buffer.name}", s.value.dtype, span=s.span)
                yield self.put(Bind(value, s.value, span=s.span), m)
                yield self.put(replace(s, value=value), m)
            case Evaluate() if self._updates(s):
                self.changed = True
                place, given, *rest = s.call.args
                value = Var("moved_update", given.dtype, span=s.span)
                yield self.put(Bind(value, given, span=s.span), m)
                yield self.put(replace(s, call=replace(s.call, args=(place, value, *rest))), m)
            case Bind() if m is not None and is_unmasked(s.value):
                yield s
            case Alloc() if m is not None:
                yield s if s.init is None else replace(s, init=None)
                if s.init is not None:
                    yield self.put(Store(s.buffer, _ZERO, s.init, span=s.span), m)
            case _:
                yield self.put(s, m)

    def _divergent(self, s: If | For | While) -> bool:
        if isinstance(s, For):
            return self.t.varies((s.start, s.extent))
        return self.t.varies(s.cond)

    def _leaves(self, s: Stmt) -> bool:
        """Whether a branch holds a jump of the loop around it; in a loop over threads it would leave that one."""
        return isinstance(s, If) and next(_jumps_of(s), None) is not None

    def jump(self, m: Mask, target: Mask, span: Any) -> Stmt:
        """The threads of m leave it, and the masks around it up to the target."""
        out: list[Stmt] = []
        at: Mask | None = m
        while at is not None:
            out.append(at.clear(span))
            if at is target:
                break
            at = at.outer
        return self.put(seq(*out, span=span), m)

    def branch(self, s: If, m: Mask | None, leave: Leave) -> Iterator[Stmt]:
        if not self.t.varies(s.cond):
            cond = s.cond
            if m is not None and not is_unmasked(cond):
                some, made = self.any_of(m, s.span)
                yield from made
                cond = logical("and", some, cond)
            then = seq(*self.seq(s.then, m, leave))
            orelse = None if s.orelse is None else seq(*self.seq(s.orelse, m, leave))
            yield If(cond, then, orelse, span=s.span)
            return
        yes, made_yes = self.mask("then", m or self.root, const(False), s.span)
        yield made_yes
        yield self.put(Store(yes.buffer, _ZERO, s.cond, span=s.span), m)
        no = None
        if s.orelse is not None:
            no, made_no = self.mask("orelse", m or self.root, const(False), s.span)
            yield made_no
            yield self.put(Store(no.buffer, _ZERO, unary("not", yes.on), span=s.span), m)
        yield from self.seq(s.then, yes, leave)
        if s.orelse is not None:
            yield from self.seq(s.orelse, no, leave)

    def any_of(self, m: Mask, span: Any) -> tuple[Expr, list[Stmt]]:
        """Whether a thread of the block is in m, one answer for the block."""
        some, made = self.variable("some", "int32", None, span)
        vote = Store(some, _ZERO, call("syncthreads_or", (m.on,), "int32", span=span), span=span)
        return load(some, _ZERO) != const(0), [made, vote]

    def loop(self, s: For, m: Mask | None) -> Iterator[Stmt]:
        if self.t.varies((s.start, s.extent)):
            yield from self.counted(s, m)
            return
        jumps = self.jumps(s.body)
        start, extent = s.start, s.extent
        if m is not None and not (is_unmasked(start) and is_unmasked(extent)):
            some, made = self.any_of(m, s.span)
            yield from made
            start, extent = select(some, start, const(0, start.dtype)), select(some, extent, const(0, extent.dtype))
        turns = m
        if jumps and Break in _kinds(s.body):
            turns, made_turns = self.mask("turns", m or self.root, const(True) if m is None else m.on, s.span)
            yield made_turns
        body = seq(*self.turn(s.body, s.body, turns, bool(jumps), s.span))
        yield replace(s, start=start, extent=extent, body=body)

    def turn(self, body: Stmt, asked: Stmt, turns: Mask | None, jumps: bool, span: Any) -> Iterator[Stmt]:
        """One turn of a loop, for the threads that have not left it.  asked: the user's body; jumps: its breaks and
        continues are not those of all threads."""
        now = turns
        if jumps and Continue in _kinds(asked):
            now, made = self.mask("turn", turns or self.root, const(True) if turns is None else turns.on, span)
            yield made
        yield from self.seq(body, now, Leave(turns, now) if jumps else Leave())

    def counted(self, s: For, m: Mask | None) -> Iterator[Stmt]:
        """A loop of another length for each thread."""
        dt = s.var.dtype
        first, made_first = self.variable("first", dt, None, s.span)
        count, made_count = self.variable("count", dt, None, s.span)
        turn_no, made_turn = self.variable("turn_no", dt, None, s.span)
        yield from (made_first, made_count, made_turn)
        yield self.put(Store(first, _ZERO, s.start, span=s.span), m)
        yield self.put(Store(count, _ZERO, s.extent, span=s.span), m)
        at = load(turn_no, _ZERO)
        body = seq(Bind(s.var, load(first, _ZERO) + at, span=s.span), s.body)
        step = Store(turn_no, _ZERO, at + const(1, dt), span=s.span)
        yield from self.together(at < load(count, _ZERO), body, s.body, step, m, s.span)

    def while_(self, s: While, m: Mask | None) -> Iterator[Stmt]:
        if m is None and not self.t.varies(s.cond) and not self.jumps(s.body):
            yield replace(s, body=seq(*self.seq(s.body, None, Leave())))
            return
        yield from self.together(s.cond, s.body, s.body, None, m, s.span)

    def together(self, cond: Expr, body: Stmt, asked: Stmt, step: Stmt | None, m: Mask | None,
                 span: Any) -> Iterator[Stmt]:
        """while cond: body, as long as some thread of the block is in the loop.  asked: the body without what was added."""
        turns, made = self.mask("turns", m or self.root, const(True) if m is None else m.on, span)
        go, made_go = self.variable("go", "int32", const(1, "int32"), span)
        yield from (made, made_go)
        inner = list(self.turn(body, asked, turns, True, span))
        yield While(load(go, _ZERO) != const(0), seq(
            self.put(Store(turns.buffer, _ZERO, cond, span=span), turns),
            Store(go, _ZERO, call("syncthreads_or", (turns.on,), "int32", span=span), span=span),
            If(load(go, _ZERO) != const(0), seq(*inner, *(() if step is None else (step,))), None, span=span)), span=span)


def _jumps_of(s: Stmt) -> Iterator[Stmt]:
    """Breaks and continues in a branch that leave the loop around it."""
    match s:
        case Seq():
            for x in s.stmts:
                yield from _jumps_of(x)
        case If():
            yield from _jumps_of(s.then)
            if s.orelse is not None:
                yield from _jumps_of(s.orelse)
        case Break() | Continue():
            yield s


def _kinds(body: Stmt) -> set[type]:
    """Whether a loop's body holds a Break, a Continue of it."""
    return {type(x) for x in _jumps_of(body)}


__all__ = ["Mask", "masked"]
