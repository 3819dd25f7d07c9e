"""Prints the statements of a block: control flow, loops over threads, Parallel nests, and tile operations by their own
printers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang import ops
from tilelang.arith import bound_to
from tilelang.ir import (Alloc, Assert, Bind, Break, Call, Continue, Evaluate, For, If, Parallel, Seq, Stmt, Store, TileOp,
                         While, GLOBAL, VARIABLE)
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import (BlockedGemm, CheckedStore, Collective, Masked, NestVersions, OncePerBlock, ReduceLoops,
                                        ThreadLoop, TileLoops)
from tilelang.target.cpu_ranges import with_loop, with_value
from tilelang.target.thread_calls import BLOCK_VOTES, MATRIX_CALLS

from . import gemm, reductions, tile_loops
from .barriers import named_barrier, warp_role_barrier
from .clusters import copy_to_rank
from .lanes import exchanges_in, publish, threads_in_warps
from .matrices import matrix_statement
from .code import Code, bind_value
from .state import Bound, Storage
from .text import Loop, clean
from .threads import active_threads, at_line, check_not_null, over_threads, this_thread
from .types import literal, load, memory_type, store
from .wgmma import wgmma_statement


class StatementPrinter:
    """Prints statements into the function of a Code."""

    def __init__(self, cx: Code) -> None:
        self.cx = cx

    def stmt(self, s: Stmt) -> None:
        """Print a statement."""
        cx = self.cx
        if cx.f.ended:
            cx.f.dead()
        if s.span is not None:
            at_line(cx, s.span)
        if cx.block.tid is None and isinstance(s, (Bind, Store, Evaluate)):
            for e in exchanges_in(s):
                if e.op in BLOCK_VOTES:
                    publish(cx, e)
        self._print(s)

    def _print(self, s: Stmt) -> None:
        printer = _PRINT.get(type(s))
        if printer is None:
            name = getattr(s, "op_name", "") or type(s).__name__
            raise unsupported(f"the statement {name}", span=s.span or self.cx.span)
        printer(self, s)

    # ---- threads --------------------------------------------------------------------------------------------------

    def _thread_loop(self, s: ThreadLoop) -> None:
        if isinstance(s.body, (Bind, Store, Evaluate)):
            for e in exchanges_in(s.body):
                publish(self.cx, e)
        over_threads(self.cx, lambda: self._print(s.body))

    def _collective(self, s: Collective) -> None:
        """Print a statement that threads execute as one: all threads, or those of a mask."""
        cx, body = self.cx, s.body
        if not isinstance(body, Masked):
            assert isinstance(body, Evaluate), "only matrix instructions are collective without a mask"
            _matrix(cx, body.call)
            return
        inner = body.body
        if isinstance(inner, Evaluate) and inner.call.op in MATRIX_CALLS:
            cx.block.active = active_threads(cx, body.mask)
            _matrix(cx, inner.call)
            cx.block.active = None
        elif met := exchanges_in(inner):
            self._exchange(body, met)
        else:
            self._once_for_mask(body, inner)

    def _once_for_mask(self, s: Masked, inner: Stmt) -> None:
        """Print a named barrier, or a tile operation that one thread starts, executed if the mask holds for some thread."""
        cx, f = self.cx, self.cx.f
        cx.block.active = active_threads(cx, s.mask)
        n = threads_in_warps(cx)
        cx.block.active = None
        some = f.let(f"icmp ne i64 {n}, 0")
        if isinstance(inner, Evaluate):
            call = inner.call
            f.branch(some, lambda: named_barrier(cx, call, n))
        else:
            f.branch(some, lambda: self._print(inner))

    def _exchange(self, s: Masked, exchanges: list[Call]) -> None:
        """Print a statement in which the threads of a mask exchange values."""
        cx, f, block = self.cx, self.cx.f, self.cx.block
        active = block.active = active_threads(cx, s.mask)
        block.live = None if s.live is None else active_threads(cx, s.live)
        block.only_returned_absent = s.only_returned_absent
        for e in exchanges:
            publish(cx, e)
        over_threads(cx, lambda: f.branch(load(f, s.mask.dtype, f.at(active, "i8", this_thread(cx))),
                                          lambda: self._print(s.body)))
        block.active = block.live = None

    def _masked(self, s: Masked) -> None:
        self.cx.f.branch(self.cx.value(s.mask), lambda: self.stmt(s.body))

    def _once_per_block(self, s: OncePerBlock) -> None:
        warp_role_barrier(self.cx, s.barrier, s.arriving, lambda: self.stmt(s.body))

    # ---- simple statements ----------------------------------------------------------------------------------------

    def _seq(self, s: Seq) -> None:
        for x in s.stmts:
            self.stmt(x)

    def _bind(self, s: Bind) -> None:
        cx = self.cx
        if s.var in cx.block.values.varying and cx.block.tid is not None:
            self._bind_per_thread(s)
            return
        bind_value(cx, s.var, s.value)
        if s.var in cx.block.faults.nulls:
            check_not_null(cx, s.var)
        cx.analyzer = with_value(cx.analyzer, s)

    def _bind_per_thread(self, s: Bind) -> None:
        cx, f, count = self.cx, self.cx.f, self.cx.block.count
        mt = memory_type(s.var.dtype, s.span)
        slot = cx.block.slots.get(s.var)
        value = cx.value(s.value)
        if slot is None:
            slot = cx.block.slots[s.var] = Storage(f.alloca(f"[{count} x {mt}]", 64, clean(s.var.name)), count)
        store(f, s.var.dtype, value, f.at(slot.base, mt, this_thread(cx)))

    def _alloc(self, s: Alloc) -> None:
        cx, b = self.cx, s.buffer
        if b.scope() == GLOBAL:
            return  # the host allocated it
        mt = memory_type(b.dtype, s.span)
        copies = cx.block.count if b.data in cx.block.values.private else 1
        if b.data not in cx.storage:  # otherwise it lies in the arena
            unit = cx.block.values.unit_of(b)
            size = -(-b.size * b.dtype.bytes // unit) * unit // b.dtype.bytes
            cx.storage[b.data] = Storage(cx.f.alloca(f"[{size * copies} x {mt}]", 64, clean(b.name)), copies, unit)
        if b.scope_name == VARIABLE:
            init = literal(0, b.dtype) if s.init is None else cx.cast_value(s.init, b.dtype)
            store(cx.f, b.dtype, init, cx.address(b, ["0"] * len(b.shape)))

    def _store(self, s: Store) -> None:
        self.cx.store(s)

    def _evaluate(self, s: Evaluate) -> None:
        self.cx.value(s.call)

    def _assert(self, s: Assert) -> None:
        """T.device_assert is checked on CUDA only. Assert statements were made calls (transform/cpu/plan_launches.py)."""

    # ---- control flow ---------------------------------------------------------------------------------------------

    def _for(self, s: For) -> None:
        if s.kind.startswith(("threadIdx", "blockIdx", "vthread")):
            raise unsupported(f"a loop bound to {s.kind}", span=s.span, hint="use T.Kernel and T.Parallel")
        cx = self.cx
        start, extent = cx.index(s.start), cx.index(s.extent)
        notes: tuple[str, ...] = ()
        factor = s.plan.factor
        if s.kind == "unroll" and factor:
            notes = (f'!"llvm.loop.unroll.count", i32 {int(factor)}',)
        cx.analyzer = with_loop(cx.analyzer, s)
        with cx.f.loop("0", extent, hint=clean(s.var.name), notes=notes) as i:
            cx.vars[s.var] = Bound(wide=cx.f.add(i, start))
            self.stmt(s.body)

    def _while(self, s: While) -> None:
        f = self.cx.f
        head, body, out = f.name_of("while"), f.name_of("do"), f.name_of("end")
        f.start(head)
        f.end(f"br i1 {self.cx.value(s.cond)}, label %{body}, label %{out}")
        f.start(body)
        f.loops.append(Loop(head, out))
        self.stmt(s.body)
        f.loops.pop()
        if not f.ended:
            f.br(head)
        f.start(out)

    def _if(self, s: If) -> None:
        cx, orelse = self.cx, s.orelse
        outside = cx.analyzer
        cond = cx.value(s.cond)

        def side(body: Stmt) -> Callable[[], None]:
            def emit() -> None:
                self.stmt(body)
                cx.analyzer = outside

            return emit

        cx.f.branch(cond, side(s.then), None if orelse is None else side(orelse))

    def _break(self, s: Break) -> None:
        loop = self.cx.f.loops[-1]
        if loop.parallel:
            raise unsupported("`break` out of T.Parallel", span=s.span,
                              hint="its iterations are independent: use a mask")
        self.cx.f.br(loop.exit)

    def _continue(self, s: Continue) -> None:
        self.cx.f.br(self.cx.f.loops[-1].step)

    # ---- Parallel -------------------------------------------------------------------------------------------------

    def _parallel(self, s: Parallel) -> None:
        block = self.cx.block
        outer, block.in_parallel = block.in_parallel, True
        self._nest(s)
        block.in_parallel = outer

    def _versions(self, s: NestVersions) -> None:
        """Print a nest without guards for the case that all tests hold, and one with guards for the other case."""
        cx, ok = self.cx, "true"
        for t in s.tests:
            if t.test_low:
                ok = cx.f.both(ok, cx.f.let(f"icmp sge i64 {cx.index(t.low)}, 0"))
            ok = cx.f.both(ok, cx.f.less(cx.index(t.high), cx.index(t.size)))
        cx.f.branch(ok, lambda: self._parallel(s.inside), lambda: self._parallel(s.edge))

    def _nest(self, s: Parallel) -> None:
        cx = self.cx
        outside = cx.analyzer
        sizes = [cx.index(e) for e in s.extents]
        cx.analyzer = bound_to(cx.analyzer, s.vars, s.extents)

        def level(k: int) -> None:
            if k == len(sizes):
                self.stmt(s.body)
                return
            with cx.f.loop("0", sizes[k], hint=clean(s.vars[k].name)) as i:
                cx.f.loops[-1].parallel = True
                cx.vars[s.vars[k]] = Bound(wide=i)
                level(k + 1)

        level(0)
        cx.analyzer = outside

    # ---- tile operations ------------------------------------------------------------------------------------------

    def _tile_op(self, s: TileOp | BlockedGemm | ReduceLoops) -> None:
        _TILE_OPS[type(s)](self.cx, s)

    def _tile_loops(self, s: TileLoops) -> None:
        if isinstance(s.op, ops.Copy) and s.op.plan.dst_block is not None:
            copy_to_rank(self.cx, s.op, lambda: tile_loops.print_tile_loops(self.cx, s))
        else:
            tile_loops.print_tile_loops(self.cx, s)


def _matrix(cx: Code, e: Call) -> None:
    (wgmma_statement if e.op == "wgmma" else matrix_statement)(cx, e)


_TILE_OPS: dict[type, Callable[[Code, Any], None]] = {
    ReduceLoops: reductions.emit_reduce, ops.Scan: reductions.emit_scan, BlockedGemm: gemm.print_gemm,
}

_PRINT: dict[type, Callable[[StatementPrinter, Any], None]] = {
    Seq: StatementPrinter._seq, Bind: StatementPrinter._bind, Alloc: StatementPrinter._alloc, Store: StatementPrinter._store,
    CheckedStore: StatementPrinter._store,
    Evaluate: StatementPrinter._evaluate, For: StatementPrinter._for, Parallel: StatementPrinter._parallel,
    While: StatementPrinter._while, If: StatementPrinter._if, ThreadLoop: StatementPrinter._thread_loop,
    Collective: StatementPrinter._collective, Masked: StatementPrinter._masked,
    OncePerBlock: StatementPrinter._once_per_block, NestVersions: StatementPrinter._versions,
    TileLoops: StatementPrinter._tile_loops, Break: StatementPrinter._break, Continue: StatementPrinter._continue,
    Assert: StatementPrinter._assert, **{k: StatementPrinter._tile_op for k in _TILE_OPS},
}
