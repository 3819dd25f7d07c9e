"""Divergent branches and loops become statements under masks, so that the threads of a block stay together.

A loop over threads runs each thread's whole statement before the next thread's.  That is not what a block means where
threads communicate inside the statement: they read what others of the branch write, exchange values between lanes, or return
while the others go on to a barrier.  Such branches and loops become statements in a row, each for the threads of a mask:

    s[tx] = s[63 - tx]                       t = s[63 - tx]; s[tx] = t
    if c: A                                  m = c; A for the threads of m
    else: B                                  n = not c; B for the threads of n
    if c: return                             m = c; live = false for the threads of m
    B                                        B for the threads of live
    while c: A (break under a condition)     m = true; go = 1
                                             while go: { m = c for the threads of m; go = any of the block in m;
                                                         if go: A for the threads of m; break: m = false }

A loop whose number of iterations differs between threads, and in which they communicate through shared memory, would need a
barrier that not all threads reach: it stays whole, and thread_loops.py rejects it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Break, Buffer, Call, Continue, Evaluate, Expr, For, If, Launch, Load, Parallel,
                         Seq, Stmt, Store, TileOp, Var, While, call, const, controls, dtype, inner, jumps_of, leaves, load,
                         logical, replace, select, seq, unary, walk, with_inner, VARIABLE)
from tilelang.ir.record import record
from tilelang.target.cpu_launch import Masked, ThreadValues, is_private
from tilelang.target.thread_calls import BLOCK_VOTES, EXCHANGES, MATRIX_CALLS

from .thread_conflicts import Conflicts
from .varying_values import (find_varying_values, is_speculatable, is_thread_work, rereads_shared, runs_unevenly,
                             some_exit_early, some_return)

_BARRIERS = ("sync_threads", "named_barrier", "named_barrier_arrive", "warp_role_barrier", "sync_grid", "cluster_arrive",
             "cluster_wait", "cluster_sync", "cp_async_commit", "cp_async_wait")
_COLLECTIVE = {*EXCHANGES, *MATRIX_CALLS, *BLOCK_VOTES, *_BARRIERS, "thread_return", "mbarrier_wait"}
_ZERO = (const(0),)


@record
class Mask:
    """A bool of each thread, and the mask around it.  only_returned_absent: all threads outside of it have returned."""

    buffer: Buffer
    outer: Mask | None
    only_returned_absent: bool = False

    @property
    def on(self) -> Expr:
        return load(self.buffer, _ZERO)

    def clear(self, span: Any) -> Stmt:
        return Store(self.buffer, _ZERO, const(False), span=span)


@record
class JumpTargets:
    """The masks that a break and a continue remove a thread from, up to this one; None: all threads jump together."""

    on_break: Mask | None = None
    on_continue: Mask | None = None


def mask_divergent(launch: Launch) -> Launch:
    """The launch with the divergent statements in which threads communicate under masks; itself when it has none."""
    threads = find_varying_values(launch)
    if threads.count == 1:
        return launch
    work = _Fission(launch, threads)
    body = seq(*work.launch_body())
    return launch if not work.changed else replace(launch, body=body)


class _Fission:
    """Rewrites one launch.  root: threads that have not returned, from the first statement on that may return."""

    def __init__(self, launch: Launch, threads: ThreadValues) -> None:
        self.launch, self.known = launch, threads
        self.changed = False
        self.conflicts = Conflicts(launch, threads)
        self.root: Mask | None = None

    # ---- small pieces -----------------------------------------------------------------------------------------------

    def variable(self, name: str, dt: Any, init: Any = None, span: Any = None) -> tuple[Buffer, Stmt]:
        self.changed = True
        b = Buffer(name, (1,), dtype(dt), VARIABLE, span=span)
        return b, Alloc(b, None if init is None else init, span=span)

    def mask(self, name: str, m: Mask | None, init: Any, span: Any) -> tuple[Mask, Stmt]:
        """A mask inside of m, and the statement that makes it.  init: None for the threads of m."""
        b, made = self.variable(name, "bool", (const(True) if m is None else m.on) if init is None else init, span)
        return Mask(b, m or self.root), made

    def put(self, s: Stmt, m: Mask | None) -> Stmt:
        """s for the threads of a mask."""
        if m is None:
            return s
        self.changed = True
        live = None if m.only_returned_absent or self.root is None else self.root.on
        return Masked(m.on, s, m.only_returned_absent, live, span=s.span)

    # ---- what needs masks -----------------------------------------------------------------------------------------------

    def communicates(self, s: Stmt, divergent: bool) -> bool:
        """Whether threads communicate in s, so that one thread's whole s cannot run before the next one's."""
        for n in walk(s):
            if isinstance(n, Call) and n.op in _COLLECTIVE:
                return True
            if isinstance(n, Parallel) or isinstance(n, TileOp) and not is_thread_work(n):
                return True
        return rereads_shared(s) or self.conflicts_in(s, divergent)

    def conflicts_in(self, s: Stmt, divergent: bool) -> bool:
        """Whether threads may access each other's elements in a statement of s that each would run whole before the next."""
        if divergent or isinstance(s, (If, For, While)) and runs_unevenly(self.known, s):
            return self.conflicts.exist_in(s)
        if isinstance(s, (Store, Evaluate)):
            return self._overwrites(s)
        return any(self.conflicts_in(x, False) for x in inner(s))

    def _overwrites(self, s: Stmt) -> bool:
        """Whether threads are to read all that a store or an update without a result needs before one of them writes."""
        if isinstance(s, Store):
            return not is_private(s.buffer) and self.known.varies((s.indices, s.value)) and (
                rereads_shared(s) or self.conflicts.overwrites(s, s.buffer.data))
        if not isinstance(s, Evaluate) or not s.call.op.startswith("atomic_") or len(s.call.args) < 2:
            return False
        place, value = s.call.args[:2]
        return isinstance(place, AddressOf) and not is_private(place.buffer) and any(
            n.buffer.data is place.buffer.data for n in walk(value, Load)) and self.conflicts.overwrites(s, place.buffer.data)

    # ---- statements -----------------------------------------------------------------------------------------------------

    def launch_body(self) -> Iterator[Stmt]:
        if some_return(self.known, self.launch.body):
            buffer, made = self.variable("live", "bool", const(True), self.launch.span)
            self.root = Mask(buffer, None, only_returned_absent=True)
            yield made
        yield from self.seq(self.launch.body, None, JumpTargets())

    def seq(self, s: Stmt, m: Mask | None, targets: JumpTargets) -> Iterator[Stmt]:
        """The statements of s, for the threads of m."""
        for x in s.stmts if isinstance(s, Seq) else (s,):
            yield from (self.seq if isinstance(x, Seq) else self.stmt)(x, m, targets)
            if m is None and self.root is not None and some_return(self.known, x):
                m = self.root

    def stmt(self, s: Stmt, m: Mask | None, targets: JumpTargets) -> Iterator[Stmt]:
        if m is None and self.root is not None and isinstance(s, (For, While)) and some_return(self.known, s):
            m = self.root  # threads that returned in one iteration are missing in the next
        divergent = self.known.varies(controls(s))
        if isinstance(s, (If, For, While)) and (
                self.communicates(s, divergent or m is not None) or m is not None and isinstance(s, If) and leaves(s)):
            if divergent and isinstance(s, (For, While)) and rereads_shared(s):
                yield self.put(s, m)
            elif isinstance(s, If):
                yield from self.branch(s, m, targets)
            elif isinstance(s, For):
                yield from self.loop(s, m)
            else:
                yield from self.while_(s, m)
            return
        match s:
            case Break() | Continue():
                target = targets.on_break if isinstance(s, Break) else targets.on_continue
                yield s if target is None or m is None else self.jump(m, target, s.span)
            case Evaluate() if s.call.op == "thread_return":
                yield s if m is None or self.root is None else self.jump(m, self.root, s.span)
            case Evaluate() if s.call.op in _BARRIERS and m is not None and m.only_returned_absent:
                yield s  # barriers do not wait for threads that returned
            case Store() | Evaluate() if self._overwrites(s):
                self.changed = True
                given = s.value if isinstance(s, Store) else s.call.args[1]
                name = f"moved_{s.buffer.name}" if isinstance(s, Store) else "moved_update"
                value = Var(name, given.dtype, span=s.span)
                yield self.put(Bind(value, given, span=s.span), m)
                yield self.put(replace(s, value=value) if isinstance(s, Store) else replace(
                    s, call=replace(s.call, args=(s.call.args[0], value, *s.call.args[2:]))), m)
            case Bind() if m is not None and is_speculatable(s.value):
                yield s
            case Alloc() if m is not None:
                yield s if s.init is None else replace(s, init=None)
                if s.init is not None:
                    yield self.put(Store(s.buffer, _ZERO, s.init, span=s.span), m)
            case _:
                yield self.put(s, m)

    def jump(self, m: Mask, target: Mask, span: Any) -> Stmt:
        """The threads of m are removed from it, and from the masks around it up to the target."""
        left = [m]
        while left[-1] is not target and left[-1].outer is not None:
            left.append(left[-1].outer)
        return self.put(seq(*(x.clear(span) for x in left), span=span), m)

    def branch(self, s: If, m: Mask | None, targets: JumpTargets) -> Iterator[Stmt]:
        if not self.known.varies(s.cond):
            cond = s.cond
            if m is not None and not is_speculatable(cond):
                some, made = self.any_of(m, s.span)
                yield from made
                cond = logical("and", some, cond)
            yield with_inner(replace(s, cond=cond), lambda x: seq(*self.seq(x, m, targets)))
            return
        ways: list[tuple[Mask, Stmt]] = []
        for name, side in (("then", s.then), ("orelse", s.orelse)):
            if side is not None:
                way, made_way = self.mask(name, m, const(False), s.span)
                yield made_way
                yield self.put(Store(way.buffer, _ZERO, unary("not", ways[0][0].on) if ways else s.cond, span=s.span), m)
                ways.append((way, side))
        for way, side in ways:
            yield from self.seq(side, way, targets)

    def any_of(self, m: Mask, span: Any) -> tuple[Expr, list[Stmt]]:
        """Whether a thread of the block is in m, one answer for the block."""
        some, made = self.variable("some", "int32", None, span)
        vote = Store(some, _ZERO, call("syncthreads_or", (m.on,), "int32", span=span), span=span)
        return load(some, _ZERO) != const(0), [made, vote]

    def loop(self, s: For, m: Mask | None) -> Iterator[Stmt]:
        if self.known.varies(controls(s)):
            yield from self.divergent_for(s, m)
            return
        jumps = some_exit_early(self.known.varies, s.body)
        start, extent = s.start, s.extent
        if m is not None and not (is_speculatable(start) and is_speculatable(extent)):
            some, made = self.any_of(m, s.span)
            yield from made
            start, extent = select(some, start, const(0, start.dtype)), select(some, extent, const(0, extent.dtype))
        inside = m
        if jumps and any(isinstance(x, Break) for x in jumps_of(s.body)):
            inside, made_inside = self.mask("turns", m, None, s.span)
            yield made_inside
        body = seq(*self.iteration(s.body, inside, jumps, s.span))
        yield replace(s, start=start, extent=extent, body=body)

    def iteration(self, body: Stmt, inside: Mask | None, jumps: bool, span: Any) -> Iterator[Stmt]:
        """One iteration of a loop, for the threads still inside it.  jumps: some threads alone take its breaks or continues."""
        now = inside
        if jumps and any(isinstance(x, Continue) for x in jumps_of(body)):
            now, made = self.mask("turn", inside, None, span)
            yield made
        yield from self.seq(body, now, JumpTargets(inside, now) if jumps else JumpTargets())

    def divergent_for(self, s: For, m: Mask | None) -> Iterator[Stmt]:
        """A loop whose bounds differ between threads."""
        dt = s.var.dtype
        (first, count, number), made = zip(*(self.variable(name, dt, None, s.span) for name in ("first", "count", "turn_no")))
        yield from made
        yield self.put(Store(first, _ZERO, s.start, span=s.span), m)
        yield self.put(Store(count, _ZERO, s.extent, span=s.span), m)
        at = load(number, _ZERO)
        body = seq(Bind(s.var, load(first, _ZERO) + at, span=s.span), s.body)
        step = Store(number, _ZERO, at + const(1, dt), span=s.span)
        yield from self.while_any(at < load(count, _ZERO), body, step, m, s.span)

    def while_(self, s: While, m: Mask | None) -> Iterator[Stmt]:
        if m is None and not runs_unevenly(self.known, s):
            yield replace(s, body=seq(*self.seq(s.body, None, JumpTargets())))
            return
        yield from self.while_any(s.cond, s.body, seq(), m, s.span)

    def while_any(self, cond: Expr, body: Stmt, step: Stmt, m: Mask | None, span: Any) -> Iterator[Stmt]:
        """while cond: body, step, as long as some thread of the block is inside the loop.  step: what all threads do."""
        inside, made = self.mask("turns", m, None, span)
        go, made_go = self.variable("go", "int32", const(1, "int32"), span)
        yield from (made, made_go)
        turn = list(self.iteration(body, inside, True, span))
        yield While(load(go, _ZERO) != const(0), seq(
            self.put(Store(inside.buffer, _ZERO, cond, span=span), inside),
            Store(go, _ZERO, call("syncthreads_or", (inside.on,), "int32", span=span), span=span),
            If(load(go, _ZERO) != const(0), seq(*turn, step), None, span=span)), span=span)
