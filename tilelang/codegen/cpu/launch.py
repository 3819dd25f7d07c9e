"""From a program to a module: the host entry, and for each launch a block function and a range-of-blocks function.

    entry(tensor pointers, scalars, symbols) -> error text or null
        host statements; per launch: fill a context record, tl_parallel_for(blocks, context, count, arena bytes)
    blocks(context, first, last, arena)      for each linear block id: block(values…, storage…)
    block(values…, storage…)                 the statements of one block

tl_parallel_for comes from the engine (runtime/cpu_pool.py).  Storage of large shared buffers and fragments are noalias
parameters of the block function, so that LLVM knows that they do not overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (
    I32,
    Alloc,
    Assert,
    Bind,
    Buffer,
    Call,
    Const,
    Evaluate,
    Expr,
    For,
    Func,
    If,
    Launch,
    Parallel,
    Seq,
    Stmt,
    Store,
    TileOp,
    Var,
    While,
    follows_addresses,
    walk,
)

from .actor_launch import GROUP_BYTES, ActorLaunch, shared_slots
from .exprs import Bound, Expressions, Storage
from .stmts import Statements, on_stack
from .lane_faults import LaneFaults
from .null_pointers import asked_behind_conditions, used_surely
from .lanes import EXCHANGES
from .masks import masked
from .matrices import MATRIX_CALLS
from .roles import needs_roles
from .text import Fn, Module, clean
from .threads import analyse_threads
from .types import literal, memory_type, unsupported, value_type


@dataclass
class Captured:
    """A value of the host function that a block uses: its LLVM type and the operand on the host side."""

    var: Var
    type: str
    operand: str


class Host(Expressions):
    """The entry function: host statements and launches."""

    def __init__(self, f: Fn, host: Any, func: Func) -> None:
        super().__init__(f, host, Analyzer())
        self.func, self.launches = func, 0
        self.allocated: list[str] = []
        config = func.attr("tilelang_pass_configs") or ()
        settings = dict(config) if not isinstance(config, dict) else config
        self.guarded = not settings.get("tl.disable_safe_memory_legalize", False)

    def stmt(self, s: Stmt) -> None:
        """Emit a host statement."""
        if s.span is not None:
            self.span = s.span
        if is_serial_code(s):
            emit_launch(self, as_block(s))
            return
        match s:
            case Seq():
                for x in s.stmts:
                    self.stmt(x)
            case Bind():
                self.bind(s.var, s.value)
            case Assert():
                self._assert(s)
            case Alloc():
                self._alloc(s)
            case If():
                orelse = s.orelse
                self.f.branch(self.value(s.cond), lambda: self.stmt(s.then),
                              None if orelse is None else lambda: self.stmt(orelse))
            case For():
                start = self.index(s.start)
                with self.f.loop("0", self.index(s.extent), hint=clean(s.var.name)) as i:
                    self.vars[s.var] = Bound(wide=self.f.add(i, start))
                    self.stmt(s.body)
            case Launch():
                emit_launch(self, s)
            case Evaluate() if s.call.op in _NO_WORK:
                pass
            case While() | _:
                raise unsupported(f"{type(s).__name__} outside a kernel", span=s.span or self.span)

    def _assert(self, s: Assert) -> None:
        message = self.f.module.string(s.message)
        self.f.branch(self.value(s.cond), lambda: None, lambda: self._fail(message))

    def _fail(self, message: str) -> None:
        self.release()
        self.f.end(f"ret ptr {message}")

    def open_block(self, body: Statements, s: Launch, names: list[str], captured: list[Captured], slots: Any) -> None:
        """Tell the statements of a block what the function's parameters stand for."""
        body.guarded, body.sources = self.guarded, s.attr("import_source") or ()
        body.safe_values = dict(s.attr("safe_values") or ())
        body.scratch = "%scratch"
        for name_, c in zip(names, captured):
            if c.var in self.storage:
                body.storage[c.var] = Storage(f"%{name_}")
            elif c.type == "i64" and c.var.dtype.is_signed:
                body.vars[c.var] = Bound(wide=f"%{name_}")
            else:
                body.vars[c.var] = Bound(value=f"%{name_}")
        for p, t in slots:
            body.storage[t.buffer.data] = Storage(f"%{p}", t.copies)
        for d, v in enumerate(s.block_vars):
            body.vars[v] = Bound(wide=f"%b{d}")
            hi = self.analyzer.interval(s.grid[d])[1]
            body.analyzer = body.analyzer.bind(v, 0, None if hi is None else max(hi - 1, 0))
            if isinstance(s.grid[d], Const) and int(s.grid[d]) > 0:
                body.swept.add(v)
        whole = body.ranges == ((0, s.num_threads),)
        for v, n in zip(s.thread_vars, s.threads):
            lo, hi = body.ranges[0] if not whole and n == s.num_threads and len(body.ranges) == 1 else (0, n)
            body.analyzer = body.analyzer.bind(v, lo, hi - 1)
            if whole or n == 1 or (lo, hi) != (0, n):
                body.swept.add(v)

    def release(self) -> None:
        free = self.f.module.declare("free", "void", "ptr")
        for p in self.allocated:
            self.f.do(f"call void {free}(ptr {self.f.let(f'load ptr, ptr {p}')})")

    def _alloc(self, s: Alloc) -> None:
        """A workspace in global memory for the length of the call."""
        b = s.buffer
        if b.scope() != "global":
            raise unsupported(f"an allocation in scope {b.scope()} outside a kernel", span=s.span)
        size = self.f.smax(self.f.mul(count_of(self, b), str(b.dtype.bytes)), "1")
        slot = self.f.alloca("ptr", hint="work")
        self.f.allocas.append(f"  store ptr null, ptr {slot}")
        make = self.f.module.declare("aligned_alloc", "ptr", "i64, i64")
        padded = self.f.mul(self.f.let(f"udiv i64 {self.f.add(size, '63')}, 64"), "64")
        if self.f.loops:  # that of the turn before is over
            free = self.f.module.declare("free", "void", "ptr")
            self.f.do(f"call void {free}(ptr {self.f.let(f'load ptr, ptr {slot}')})")
        got = self.f.let(f"call ptr {make}(i64 64, i64 {padded})")
        self.f.do(f"store ptr {got}, ptr {slot}")
        self.allocated.append(slot)
        self.storage[b.data] = Storage(got)
        memory = self.f.module.string("out of memory for a global workspace")
        self.f.branch(self.f.let(f"icmp eq ptr {got}, null"), lambda: self._fail(memory))


_NO_WORK = ("assume", "evaluate", "no_op")  # calls outside a kernel that do nothing


def is_serial_code(s: Stmt) -> bool:
    """Whether s is work outside T.Kernel (stores, loops over them, tile operations) that holds no launch, assertion or
    name that other statements see: it runs as one block of one thread."""
    inside = [n for n in walk(s) if isinstance(n, Stmt)]
    if any(isinstance(x, (Launch, Assert)) for x in inside):
        return False
    if isinstance(s, (Store, Parallel, TileOp, While)) or isinstance(s, Evaluate) and s.call.op not in _NO_WORK:
        return True
    return isinstance(s, (For, If)) and any(is_serial_code(x) for x in inside[1:])


def as_block(s: Stmt) -> Launch:
    """s as a launch of one block with one thread."""
    names = [Var(n, I32) for n in ("bx", "tx", "ty", "tz")]
    return Launch((Const(1, I32),), (names[0],), (1, 1, 1), (names[1], names[2], names[3]), s, span=s.span)


def count_of(cx: Expressions, b: Buffer) -> str:
    """Elements of a buffer, i64."""
    out = "1"
    for d in b.shape:
        out = cx.f.mul(out, cx.index(d))
    return out


# ---- a launch ------------------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """Arena storage of one buffer: bytes as an expression of host values."""

    buffer: Buffer
    copies: int


def emit_launch(cx: Host, s: Launch) -> None:
    """The block and blocks functions of a launch, and its call; twice where pointers that are null need another one."""
    pointers = [p for p in cx.func.params if p.dtype.is_handle and cx.func.buffer_of(p) is None]
    nulls = {} if needs_roles(s) else used_surely(s, pointers)
    asked, more = asked_behind_conditions(s, [] if needs_roles(s) else [p for p in pointers if p not in nulls])
    if not more:
        _emit_launch(cx, s, nulls)
        return
    null = "false"
    for p in pointers:
        null = cx.f.let(f"or i1 {null}, {cx.f.let(f'icmp eq ptr {cx.value(p)}, null')}")
    cx.f.branch(null, lambda: _emit_launch(cx, asked, {**nulls, **more}), lambda: _emit_launch(cx, s, nulls))


def _emit_launch(cx: Host, s: Launch, nulls: dict[Var, str]) -> None:
    """nulls: addresses that must not be null -> what is wrong where they are."""
    number, cx.launches = cx.launches, cx.launches + 1
    name = f"{clean(cx.func.name)}_kernel" + (f"_{number}" if number else "")
    actors = needs_roles(s)
    threads = None
    if not actors:
        s = masked(s)
        threads = analyse_threads(s)
    for n in walk(s.body):
        if isinstance(n, Alloc) and n.buffer.scope() == "global":
            cx._alloc(n)  # one workspace for all blocks of the launch
    slots = [Slot(b, copies) for b, copies in shared_slots(s)] if actors else _arena_slots(s, threads)
    captured = _capture(cx, s)
    faults = LaneFaults()
    word = ""
    if nulls or any(isinstance(n, Call) and n.op in (*EXCHANGES, *MATRIX_CALLS) for n in walk(s.body)):
        word = cx.f.alloca("i64", hint="lane_fault")
        cx.f.do(f"store i64 0, ptr {word}")
        captured.append(Captured(faults.word, "ptr", word))
        faults.null_pointers(nulls)
    run = None
    if actors:
        run = ActorLaunch(cx, s, name, slots, captured, faults)
        used_scratch = run.scratch
    else:
        block, used_scratch = _block_function(cx, s, name, threads, slots, captured, faults)
    f = cx.f
    sizes = [f.let(f"and i64 {f.add(f.mul(count_of(cx, t.buffer), str(t.copies * t.buffer.dtype.bytes)), '63')}, -64")
             for t in slots]
    grid = [cx.index(g) for g in s.grid] + ["1"] * (3 - len(s.grid))
    count = "1"
    for g in grid:
        count = f.mul(count, f.smax(g, "0"))
    total = _arena_bytes(f, sizes, used_scratch, count, run)
    if run is not None:
        run.check_grid(grid)
    record = [("ptr", c.operand) if c.type == "ptr" else (c.type, c.operand) for c in captured]
    record += [("i64", g) for g in grid[:2]] + [("i64", x) for x in sizes]
    if run is not None:
        failed = f.alloca("i32", hint="failed")
        f.do(f"store i32 0, ptr {failed}")
        record += [("i64", count), ("ptr", failed)]
    kind, context = _stored(f, record)
    if run is not None:
        run.blocks_function(kind, len(captured) + 2, len(record) - 2, len(record) - 1)
        count = run.groups(count)
    else:
        _blocks_function(cx, name, block, kind, captured, slots, used_scratch)
    start = f.module.declare("tl_parallel_for", "i32", "ptr, ptr, i64, i64")
    status = f.let(f"call i32 {start}(ptr @{name}, ptr {context}, i64 {count}, i64 {total})")
    if "printf" in f.module.parts:
        f.do(f"call i32 {f.module.declare('fflush', 'i32', 'ptr')}(ptr null)")
    message = f.module.string("out of memory for the storage of a block")
    f.branch(f.let(f"icmp ne i32 {status}, 0"), lambda: cx._fail(message))
    if run is not None:
        run.report(failed)
    _tell(cx, faults, word)


def _arena_bytes(f: Fn, sizes: list[str], scratch: int, count: str, run: ActorLaunch | None) -> str:
    """Bytes of storage of the blocks that one worker thread runs at a time.  sizes: of the slots of a block.  count: blocks."""
    total = str(-(-scratch // 64) * 64)
    if run is not None:
        blocks = count if run.grid else str(math.prod(run.cluster))
        return f.add(f.add(f.mul(blocks, run.block_bytes(f, sizes)), str(GROUP_BYTES)), total)
    for x in sizes:
        total = f.add(x, total)
    return total


def _stored(f: Fn, record: list[tuple[str, str]]) -> tuple[str, str]:
    """(type, address) of a structure on the host's stack of these (type, value)."""
    kind = "{ " + ", ".join(t for t, _ in record) + " }"
    context = f.alloca(kind, 16, "context")
    for k, (t, v) in enumerate(record):
        at = f.let(f"getelementptr inbounds {kind}, ptr {context}, i32 0, i32 {k}")
        f.do(f"store {t} {v}, ptr {at}")
    return kind, context


def _tell(cx: Host, faults: LaneFaults, word: str) -> None:
    """Fails the call where a lane has left the code of a fault in `word`."""
    f = cx.f
    for code, text in enumerate(faults.texts, 1):
        told = f.module.string(f"kernel {cx.func.name}: {text}")
        f.branch(f.let(f"icmp eq i64 {f.let(f'load i64, ptr {word}')}, {code}"), partial(cx._fail, told))


def _arena_slots(s: Launch, threads: Any) -> list[Slot]:
    """Buffers of the block that are too large for the stack."""
    out, seen = [], set()
    for n in walk(s.body):
        if isinstance(n, Alloc) and n.buffer.data not in seen:
            copies = threads.count if n.buffer.data in threads.private else 1
            if n.buffer.scope() in ("shared.barrier", "shared.cluster_barrier", "shared.tmem"):
                raise unsupported(f"memory of scope {n.buffer.scope()}", span=n.span)
            if n.buffer.scope() == "global":
                continue
            if not on_stack(n.buffer, copies):
                seen.add(n.buffer.data)
                out.append(Slot(n.buffer, copies))
    return out


def _capture(cx: Host, s: Launch) -> list[Captured]:
    """Host values the launch uses: parameters, symbols, bound variables, tensor addresses."""
    used: set[Var] = set()
    inner: set[Var] = set()

    def expr(e: Any) -> None:
        if isinstance(e, Expr):
            used.update(v for v in walk(e) if isinstance(v, Var))

    for n in walk(s):
        if isinstance(n, Var):
            used.add(n)
        elif isinstance(n, Buffer):
            used.add(n.data)
            for d in (*n.shape, *(n.strides_ or ()), n.offset):
                expr(d)
        elif isinstance(n, Alloc) and n.buffer.scope() != "global":
            inner.add(n.buffer.data)
    for _, safe in s.attr("safe_values") or ():
        expr(safe)
    out = []
    for v, where in cx.storage.items():
        if v in used and v not in inner:
            out.append(Captured(v, "ptr", where.base))
    for v, bound in cx.vars.items():
        if v in used and v not in inner and v not in cx.storage:
            if bound.wide is not None:
                out.append(Captured(v, "i64", bound.wide))
            else:
                out.append(Captured(v, value_type(v.dtype), cx.value(v)))
    return out


def _block_function(cx: Host, s: Launch, name: str, threads: Any, slots: list[Slot], captured: list[Captured],
                    faults: LaneFaults) -> tuple[str, int]:
    """define void @name_block(block ids, captured values, storage, scratch); returns its name and scratch bytes."""
    may_alias, free = set(cx.func.attr("may_alias") or ()), follows_addresses(s)
    aliased = {id(b.data) for _, b in cx.func.buffers if free or b.name in may_alias}
    params = [("i64", f"b{d}", "") for d in range(3)]
    names = [f"{clean(c.var.name)}_{k}" for k, c in enumerate(captured)]
    places = [f"{clean(t.buffer.name)}_{len(captured) + k}" for k, t in enumerate(slots)]
    for name_, c in zip(names, captured):
        tensor = c.type == "ptr" and c.var in cx.storage and id(c.var) not in aliased
        params.append((c.type, name_, "noalias" if tensor else ""))
    params += [("ptr", p, "noalias nonnull align 64") for p in places]
    params.append(("ptr", "scratch", "noalias nonnull align 64"))
    f = Fn(cx.f.module, f"{name}_block", "void", params, attrs="nounwind noinline")
    body = Statements(f, cx.host, Analyzer(), threads, s.thread_vars, s.threads)
    body.faults = faults
    cx.open_block(body, s, names, captured, zip(places, slots))
    for v in cx.func.params:
        if v in faults.nulls:
            body.not_null(v)
    body.stmt(s.body)
    if not f.ended:
        f.end("ret void")
    f.finish()
    return f.name, body.scratch_bytes


def _blocks_function(cx: Host, name: str, block: str, kind: str, captured: list[Captured], slots: list[Slot],
                     scratch: int) -> None:
    """define void @name(context, first, last, arena): the blocks [first, last) one after another."""
    f = Fn(cx.f.module, name, "void",
           [("ptr", "context", "noalias readonly"), ("i64", "first", ""), ("i64", "last", ""),
            ("ptr", "arena", "noalias")])

    def read(k: int, t: str) -> str:
        return f.let(f"load {t}, ptr {f.let(f'getelementptr inbounds {kind}, ptr %context, i32 0, i32 {k}')}")

    values = [(c.type, read(k, c.type)) for k, c in enumerate(captured)]
    n = len(captured)
    gx, gy = read(n, "i64"), read(n + 1, "i64")
    at, places = str(-(-scratch // 64) * 64), []
    for k in range(len(slots)):
        places.append(f.at("%arena", "i8", at))
        at = f.add(at, read(n + 2 + k, "i64"))
    with f.loop("%first", "%last", hint="block") as i:
        x = f.let(f"urem i64 {i}, {gx}")
        rest = f.let(f"udiv i64 {i}, {gx}")
        y, z = f.let(f"urem i64 {rest}, {gy}"), f.let(f"udiv i64 {rest}, {gy}")
        args = [f"i64 {v}" for v in (x, y, z)] + [f"{t} {v}" for t, v in values]
        args += [f"ptr {p}" for p in places] + ["ptr %arena"]
        f.do(f"call void @{block}({', '.join(args)})")
    f.end("ret void")
    f.finish()


__all__ = ["Host", "Module", "literal", "memory_type"]
