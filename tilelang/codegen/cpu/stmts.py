"""Statements of a block: control flow, Parallel nests, loops over threads, and tile operations by their emitter."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from typing import Any

from tilelang import ops
from tilelang.ir import (
    Alloc,
    Assert,
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
    Load,
    Parallel,
    Seq,
    Stmt,
    Store,
    TileOp,
    Var,
    While,
    walk,
)

from . import gemm, tile_loops
from .actors import named_barrier, together
from .clusters import copy_there
from .effects import EFFECTS
from .exprs import Bound, Expressions, Storage
from .guards import plan_guards
from .lane_faults import LaneFaults
from .lanes import BLOCK_VOTES, LANE_EFFECTS, active_threads, exchanges_in, publish, threads_in_warps
from .matrices import MATRIX_CALLS, matrix_statement
from .text import Fn, Loop, clean
from .threads import Masked, Threads, Together
from .types import literal, load, memory_type, store, unsupported, value_type
from .wgmma import wgmma_statement

STACK_BYTES = 4096  # larger arrays come from the worker's arena


def static_bytes(b: Buffer, copies: int = 1) -> int | None:
    """Bytes of a buffer, None when its shape is known only at run time."""
    return b.size * b.dtype.bytes * copies if b.is_static else None


def on_stack(b: Buffer, copies: int) -> bool:
    """Whether a block's buffer is small enough for the stack of the block function."""
    size = static_bytes(b, copies)
    return b.scope_name == "local.var" and copies == 1 or size is not None and size <= STACK_BYTES


class Statements(Expressions):
    """Emits the statements of one block.  threads: what depends on the thread; scratch: packing space of gemms."""

    def __init__(self, f: Fn, host: Any, analyzer: Any, threads: Threads, thread_vars: tuple[Var, ...],
                 extents: tuple[int, int, int]) -> None:
        super().__init__(f, host, analyzer)
        self.threads, self.thread_vars, self.extents = threads, thread_vars, extents
        self.exchanged: dict[int, Storage] = {}
        self.voted: dict[int, str] = {}  # answers of the block
        self.active: str | None = None  # a byte a thread: whether it takes part in the statement's exchanges; None: all do
        self.left: str | None = None  # a byte a thread: whether it has not returned; None: none has
        self.whole = False  # whether only those that have returned take no part
        self.faults = LaneFaults()
        self.in_parallel = False
        # In a launch whose roles wait for each other (actors.py): the role, the threads it has, its coroutine.
        self.role: Any = None
        self.ranges: tuple[tuple[int, int], ...] = ((0, threads.count),)
        self.coroutine: Any = None
        self.cluster = 1, 1  # blocks of a cluster, roles of a block
        # What it names by address: descriptors.Addresses, tensor maps by name, texts and numbers of misuses.
        self.addresses: Any = None
        self.maps: dict[str, Any] = {}
        self.misuses: dict[str, int] = {}
        self.waited: str | None = None  # how often the role has waited at the cluster's barrier
        self.scratch, self.scratch_bytes = "null", 0
        self.outside_threads()

    def effects(self) -> dict[str, Callable[[Any, Call], str]]:
        return _CALLS

    # ---- dispatch -------------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> None:
        """Emit a statement."""
        if self.f.ended:
            self.f.dead()
        if s.span is not None:
            self.at_line(s.span)
        if id(s) in self.threads.looped and self.tid is None:
            if isinstance(s, Masked) and self._of_mask(s):
                return
            if isinstance(s, Evaluate) and s.call.op in MATRIX_CALLS:
                self._matrix(s.call)
                return
            if isinstance(s, (Bind, Store, Evaluate)):
                for e in exchanges_in(s):
                    publish(self, e)
            self.over_threads(lambda: self._emit(s))
        else:
            if self.tid is None and isinstance(s, (Bind, Store, Evaluate)):
                for e in exchanges_in(s):
                    if e.op in BLOCK_VOTES:
                        publish(self, e)
            self._emit(s)

    def _of_mask(self, s: Masked) -> bool:
        """Emit what the threads of a mask do as one; False for what each does for itself."""
        body = s.body
        if isinstance(body, Evaluate) and body.call.op in MATRIX_CALLS:
            self.active = active_threads(self, s.mask)
            self._matrix(body.call)
            self.active = None
            return True
        if met := exchanges_in(body):
            self._exchange(s, met)
            return True
        barrier = isinstance(body, Evaluate) and body.call.op in ("named_barrier", "named_barrier_arrive")
        if not barrier and not (isinstance(body, TileOp) and body.attr("by_hand")):
            return False
        f = self.f
        self.active = active_threads(self, s.mask)
        n = threads_in_warps(self)
        self.active = None
        self.maybe += 1
        if isinstance(body, Evaluate):
            call = body.call
            f.branch(f.let(f"icmp ne i64 {n}, 0"), lambda: named_barrier(self, call, n))
        else:
            f.branch(f.let(f"icmp ne i64 {n}, 0"), lambda: self._emit(body))
        self.maybe -= 1
        return True

    def _matrix(self, e: Call) -> None:
        (wgmma_statement if e.op == "wgmma" else matrix_statement)(self, e)

    def _together(self, s: Together) -> None:
        together(self, s.key, lambda: self.stmt(s.body))

    def _exchange(self, s: Masked, met: list[Call]) -> None:
        """A statement in which the threads of a mask exchange values."""
        f = self.f
        active = self.active = active_threads(self, s.mask)
        self.left, self.whole = None if s.left is None else active_threads(self, s.left), s.whole
        for e in met:
            publish(self, e)
        self.maybe += 1
        self.over_threads(lambda: f.branch(load(f, s.mask.dtype, f.at(active, "i8", str(self.tid))),
                                           lambda: self._emit(s.body)))
        self.maybe -= 1
        self.active = self.left = None

    def _masked(self, s: Masked) -> None:
        self.maybe += 1
        self.f.branch(self.value(s.mask), lambda: self.stmt(s.body))
        self.maybe -= 1

    def at_line(self, span: Any) -> None:
        """Remember the user's place, and name it in the text when the line changes."""
        if self.span is None or (span.line, span.file) != (self.span.line, self.span.file):
            text = linecache.getline(span.file, span.line).strip()
            self.f.comment(f"{os.path.basename(span.file)}:{span.line}  {text}")
        self.span = span

    def _emit(self, s: Stmt) -> None:
        emit = _EMIT.get(type(s))
        if emit is None:
            name = getattr(s, "op_name", "") or type(s).__name__
            raise unsupported(f"the statement {name}", span=s.span or self.span)
        emit(self, s)

    def over_threads(self, body: Callable[[], None]) -> None:
        """for tid in range(threads): body, with the thread indices bound; the threads of the role, where there are roles."""
        f = self.f
        for lo, hi in self.ranges:
            with f.loop(str(lo), str(hi), hint="tid") as t:
                x, y, _ = self.extents
                ids = [t, "0", "0"]
                if self.threads.count != x:
                    ids[0] = f.let(f"urem i64 {t}, {x}")
                    rest = f.let(f"udiv i64 {t}, {x}")
                    ids[1], ids[2] = f.let(f"urem i64 {rest}, {y}"), f.let(f"udiv i64 {rest}, {y}")
                for v, i in zip(self.thread_vars, ids):
                    self.vars[v] = Bound(wide=i)
                self.tid = t
                body()
                self.tid = None
        self.outside_threads()

    @property
    def first_thread(self) -> str:
        """Whose values stand for those of all threads of the role where they agree."""
        return str(self.ranges[0][0])

    def leave(self) -> None:
        """All threads are done."""
        if self.coroutine is None:
            self.f.end("ret void")
        else:
            self.coroutine.leave()

    def outside_threads(self) -> None:
        """Code of the whole block: the thread index is 0."""
        for v in self.thread_vars:
            self.vars[v] = Bound(wide="0")

    def _var(self, e: Var) -> str:
        slot = self.slots.get(e)
        if slot is not None:
            return load(self.f, e.dtype, self.f.at(slot.base, memory_type(e.dtype), self.tid or self.first_thread))
        return super()._var(e)

    # ---- simple statements ----------------------------------------------------------------------------------------

    def _seq(self, s: Seq) -> None:
        for x in s.stmts:
            self.stmt(x)

    def _bind(self, s: Bind) -> None:
        if s.var in self.threads.varying and self.tid is not None:
            self._bind_per_thread(s)
            return
        self.bind(s.var, s.value)
        if s.var in self.faults.nulls:
            self.not_null(s.var)
        if s.var.dtype.is_signed and s.var.dtype.lanes == 1 and s.value.dtype == s.var.dtype:
            lo, hi = self.analyzer.interval(s.value)
            self.analyzer = self.analyzer.bind(s.var, lo, hi)

    def not_null(self, v: Var) -> None:
        """The block ends where an address is null whose tensor is used, and the call fails."""
        def leave() -> None:
            self.f.do(f"store i64 {self.faults.nulls[v]}, ptr {self.value(self.faults.word)}")
            self.f.end("ret void")

        self.f.branch(self.f.let(f"icmp eq ptr {self.value(v)}, null"), leave)

    def _bind_per_thread(self, s: Bind) -> None:
        mt = memory_type(s.var.dtype, s.span)
        slot = self.slots.get(s.var)
        value = self.value(s.value)
        if slot is None:
            slot = Storage(self.f.alloca(f"[{self.threads.count} x {mt}]", 64, clean(s.var.name)), self.threads.count)
            self.slots[s.var] = slot
        store(self.f, s.var.dtype, value, self.f.at(slot.base, mt, self.tid or "0"))

    def _alloc(self, s: Alloc) -> None:
        b = s.buffer
        if b.scope() == "global":
            return  # the host made it
        mt = memory_type(b.dtype, s.span)
        copies = self.threads.count if b.data in self.threads.private else 1
        if b.data not in self.storage:
            if not on_stack(b, copies) and self.coroutine is None:
                raise unsupported(f"an allocation of {b.name} inside a loop over threads", span=s.span)
            count = b.size * copies
            self.storage[b.data] = Storage(self.f.alloca(f"[{count} x {mt}]", 64, clean(b.name)), copies)
        if b.scope_name == "local.var":
            init = literal(0, b.dtype) if s.init is None else self.cast_value(s.init, b.dtype)
            store(self.f, b.dtype, init, self.address(b, ["0"] * len(b.shape)))

    def _store(self, s: Store) -> None:
        self.store(s, s.buffer, s.indices, s.value)

    def _evaluate(self, s: Evaluate) -> None:
        self.value(s.call)

    def _assert(self, s: Assert) -> None:
        """T.device_assert is checked on CUDA only."""

    # ---- control flow ---------------------------------------------------------------------------------------------

    def _for(self, s: For) -> None:
        if s.kind.startswith(("threadIdx", "blockIdx", "vthread")):
            raise unsupported(f"a loop bound to {s.kind}", span=s.span, hint="use T.Kernel and T.Parallel")
        start, extent = self.index(s.start), self.index(s.extent)
        notes: tuple[str, ...] = ()
        factor = s.attr("factor")
        if s.kind == "unroll" and factor:
            notes = (f'!"llvm.loop.unroll.count", i32 {int(factor)}',)
        self.bind_loop_var(s.var, s.start, s.extent)
        skipping = self.enter([s.var], [s.start, s.extent], s.body)
        with self.f.loop("0", extent, hint=clean(s.var.name), notes=notes) as i:
            self.vars[s.var] = Bound(wide=self.f.add(i, start))
            self.stmt(s.body)
        self.maybe -= skipping

    def enter(self, loop_vars: Any, bounds: Any, body: Stmt) -> int:
        """Note a loop for check_bounds: does it run all values of its variables, and all of its body?"""
        constant = all(isinstance(b, Const) for b in bounds) and all(int(b) > 0 for b in bounds[-len(loop_vars):])
        if constant:
            self.swept.update(loop_vars)
        skipping = not constant or any(isinstance(n, (Break, Continue)) for n in walk(body))
        self.maybe += skipping
        return int(skipping)

    def bind_loop_var(self, v: Var, start: Expr, extent: Expr) -> None:
        """Tell the analyzer the range of a loop variable."""
        lo, hi = self.analyzer.interval(start)
        count = self.analyzer.interval(extent)[1]
        if lo is not None or hi is not None:
            last = None if hi is None or count is None else max(hi + count - 1, lo or 0)
            self.analyzer = self.analyzer.bind(v, lo, last)

    def _while(self, s: While) -> None:
        f = self.f
        head, body, out = f.name_of("while"), f.name_of("do"), f.name_of("end")
        f.start(head)
        f.end(f"br i1 {self.value(s.cond)}, label %{body}, label %{out}")
        f.start(body)
        f.loops.append(Loop(head, out))
        self.maybe += 1
        self.stmt(s.body)
        self.maybe -= 1
        f.loops.pop()
        if not f.ended:
            f.br(head)
        f.start(out)

    def _if(self, s: If) -> None:
        orelse = s.orelse
        outside = self.analyzer
        cond = self.value(s.cond)

        def side(body: Stmt) -> Callable[[], None]:
            def emit() -> None:
                self.maybe += 1
                self.stmt(body)
                self.maybe -= 1
                self.analyzer = outside

            return emit

        self.f.branch(cond, side(s.then), None if orelse is None else side(orelse))

    def _break(self, s: Break) -> None:
        if self.f.loops[-1].parallel:
            raise unsupported("`break` out of T.Parallel", span=s.span,
                              hint="its iterations are independent: use a mask")
        self.f.br(self.f.loops[-1].exit)

    def _continue(self, s: Continue) -> None:
        self.f.br(self.f.loops[-1].step)

    # ---- Parallel -------------------------------------------------------------------------------------------------

    def _parallel(self, s: Parallel) -> None:
        """A loop nest.  When its global accesses can be cleared by a test of their corners, the nest is emitted twice:
        without guards for tiles inside, with guards for tiles at the edge."""
        if self.in_parallel:
            self._nest(s)
            return
        self.in_parallel = True
        plan = plan_guards(self, s)
        if not plan.accesses:
            self._nest(s)
        else:
            saved = set(self.trusted)

            def inside() -> None:
                self.trusted |= plan.accesses
                self._nest(s)
                self.trusted = set(saved)

            self.f.branch(plan.condition(self), inside, lambda: self._nest(s))
        self.in_parallel = False

    def _nest(self, s: Parallel) -> None:
        outside = self.analyzer
        sizes = [self.index(e) for e in s.extents]
        for v, e in zip(s.vars, s.extents):
            hi = self.analyzer.interval(e)[1]
            self.analyzer = self.analyzer.bind(v, 0, None if hi is None else max(hi - 1, 0))

        skipping = self.enter(s.vars, s.extents, s.body)

        def level(k: int) -> None:
            if k == len(sizes):
                self.stmt(s.body)
                return
            with self.f.loop("0", sizes[k], hint=clean(s.vars[k].name)) as i:
                self.f.loops[-1].parallel = True
                self.vars[s.vars[k]] = Bound(wide=i)
                level(k + 1)

        level(0)
        self.maybe -= skipping
        self.analyzer = outside

    # ---- tile operations ------------------------------------------------------------------------------------------

    def _tile_op(self, s: TileOp) -> None:
        for a in s.accesses():  # type: ignore[attr-defined]
            r = a.region
            self.check_bounds(r.buffer, r.mins, r.span or s.span, r.extents)
        if s.attr("dst_block") is not None:
            copy_there(self, s, lambda: _TILE[type(s)](self, s))
        else:
            _TILE[type(s)](self, s)


_CALLS = {**EFFECTS, **LANE_EFFECTS}

_TILE: dict[type, Callable[[Statements, Any], None]] = {
    ops.Copy: tile_loops.emit_copy, ops.Fill: tile_loops.emit_fill, ops.Transpose: tile_loops.emit_transpose,
    ops.Reduce: tile_loops.emit_reduce, ops.Scan: tile_loops.emit_scan, ops.AtomicTile: tile_loops.emit_atomic,
    ops.Gemm: gemm.emit_gemm,
}

_EMIT: dict[type, Callable[[Statements, Any], None]] = {
    Seq: Statements._seq, Bind: Statements._bind, Alloc: Statements._alloc, Store: Statements._store,
    Evaluate: Statements._evaluate, For: Statements._for, Parallel: Statements._parallel, While: Statements._while,
    If: Statements._if, Masked: Statements._masked, Together: Statements._together,
    Break: Statements._break, Continue: Statements._continue, Assert: Statements._assert,
    **{k: Statements._tile_op for k in _TILE},
}

__all__ = ["Load", "STACK_BYTES", "Statements", "on_stack", "static_bytes", "value_type"]
