"""Reject T.Parallel loops and tile operations whose result depends on a thread's number or private memory.

    v = T.alloc_var("int32")
    for i in T.Parallel(64):
        v = A[i]                      # allowed: a temporary of this iteration
        O[i] = v + tx                 # parallel-thread: it is not fixed which thread runs iteration i
    O[tx] = v                         # parallel-left: it is not defined which iteration's v this is

In T.Parallel a private array or variable is either a temporary of one iteration, or holds the same value in all threads.
The check interprets the program in execution order, once for each set of warp groups with code of its own. Short loops
are followed iteration by iteration, so that elements of private arrays are known one by one.
"""

from __future__ import annotations

from dataclasses import field
from functools import reduce
from typing import Any

import numpy as np

from tilelang.arith import Analyzer
from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Alloc, Assert, Binary, Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For,
                         Func, If, Launch, Load, Node, Parallel, Region, Seq, Stmt, Store, TileOp, Var, While, children,
                         contains, controls, inner, statements, substitute, walk, PRIVATE)
from tilelang.ir.record import state
from tilelang.ops import Copy
from tilelang.target.intrinsics import INTRINSICS, PURE, READS, WARP
from tilelang.target.thread_calls import BLOCK_VOTES, CLOCKS, public_name
from tilelang.target.warp_groups import WARP_LANES, holds_in, warps_in

from .check_collective import of_host, taken
from ..analysis.disjoint import computed
from ..analysis.effects import expr_effects
from ..framework.pass_ import TILE, PassContext, pass_

register("parallel-thread", ValueError, "a tile operation or T.Parallel uses a value that differs between threads",
         "which thread runs an iteration is not fixed: compute from the loop's variables, or write each thread's work outside "
         "T.Parallel", expected="one value for all threads that take part")
register("parallel-carried", ValueError, "a variable carries a value from one T.Parallel iteration to the next",
         "accumulate into a fragment and reduce it with T.reduce_*, or use T.serial",
         expected="iterations that do not depend on each other")
register("parallel-exchange", ValueError, "T.Parallel holds what threads tell each other or wait for",
         "which thread runs an iteration, and with which others, is not fixed: write it for T.get_thread_binding(), "
         "or reduce a fragment", expected="work of single iterations")
register("parallel-left", ValueError, "a private variable is read after the T.Parallel loop that set it",
         "which iteration a thread ran last is not fixed: keep the values in a fragment or in shared memory",
         expected="a value stored since, by each thread")

# What an iteration may do besides computing and reading: change single elements, order its own accesses, print, stop.
_OF_ITERATIONS = frozenset((
    "atomic_add", "atomic_max", "atomic_min", "atomic_or", "atomic_and", "atomic_xor", "atomic_exchange", "atomic_store",
    "atomic_inc", "atomic_dec", "atomic_cas",
    "atomic_addx2", "atomic_addx4", "cp_async", "cluster_store", "tma_prefetch", "printf", "trap", "fence_gpu", "fence_block",
    "fence_proxy_async", "fence_proxy_async_global", "keep_branch"))
# Thread numbers: rejected where they differ between threads.
_NUMBERS = frozenset(("shuffle_elect", "elect_one", "warp_uniform"))
_STEPS = 1 << 12  # limit on statements of unrolled loops that are followed one by one
_SPEAKS = ("printf", "assume")  # their arguments do not affect what an iteration does
STALE, VARIES, STORED = 1, 2, 4  # bits of an element: see Memory
_COMBINE = ("add", "mul", "min", "max", "bitand", "bitor", "bitxor", "and", "or")


@pass_(needs=TILE)
def check_private(func: Func, cx: PassContext) -> Func:
    """Reject per-thread values and private memory where the whole block works together, for every target.

    Rejected are: thread numbers and values computed from them in T.Parallel and tile operations; private memory that carries
    a value from one iteration of T.Parallel to another or out of the loop; block-wide work after a return of some threads; and
    in T.Parallel what threads tell each other or wait for.
    Changes nothing. Raises parallel-thread, parallel-carried, parallel-left, parallel-exchange, collective-divergent.
    """
    _check_calls(func)
    _run(func.body, None, ())
    for s in walk(func.body, Launch):
        if _asks(s):
            everyone = warps_in(s)
            for warps in sorted(_sets(s.body, everyone, {everyone})):
                _run(s.body, s, warps)
    return func


def _check_calls(func: Func) -> None:
    """Reject lane exchanges, barriers of every kind, and per-thread operations in T.Parallel.

    Per-thread operations are returns, waits for the thread's copies, and register reallocation. Which iterations a warp runs
    together, and how many a thread runs, depends on the chosen layout.
    """
    for s in walk(func, Parallel):
        for c in walk(s.body, Call):
            row = INTRINSICS.get(c.op)
            if row is None or row.effect in (PURE, READS) or row.name in _OF_ITERATIONS or row.name in _NUMBERS:
                continue
            name = public_name(row.name)
            if row.name == "thread_return":
                raise error("parallel-exchange", "T.thread_return ends a thread, and iterations of T.Parallel belong to none",
                            found=name, span=c.span, notes=((s.span, "the loop"),), hint="`continue` ends an iteration")
            several = "threads" if row.name.startswith("cp_async_") else "several threads"
            raise error("parallel-exchange", f"{name} is an act of {several}, and iterations of T.Parallel belong to none",
                        found=name, span=c.span, notes=((s.span, "the loop"),))


def _run(body: Stmt, launch: Launch | None, warps: tuple[int, ...]) -> None:
    if launch is not None or any(isinstance(s, Parallel) for s in of_host(body)):
        _Walk(Values(launch, warps)).stmt(body)


def _asks(launch: Launch) -> bool:
    """Whether a launch holds anything that may differ between threads."""
    own = set(launch.thread_vars)

    def of_thread(n: Node) -> bool:
        if isinstance(n, Call):
            row = INTRINSICS.get(n.op)
            return n.op == "thread_return" or n.op.startswith(("get_", "atomic_")) or row is not None and row.effect == WARP
        return n.buffer.scope_name in PRIVATE if isinstance(n, Alloc) else n in own

    return any(True for _ in walk(launch.body, Parallel, TileOp)) and any(map(of_thread, walk(launch.body)))


def _sets(s: Stmt, warps: tuple[int, ...], out: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """The sets of warps that run statements of their own."""
    if isinstance(s, If):
        for piece, wanted in zip(inner(s), (True, False)):
            if (come := tuple(w for w in warps if holds_in(s.cond, w) in (wanted, None))):
                out.add(come)
                _sets(piece, come, out)
        return out
    for x in inner(s):
        _sets(x, warps, out)
    return out


@state
class _Loop:
    """A loop around.  some: only some threads run it.  parted: only some leave it early, though all run it.  ends: the state of
    private memory at each early exit."""

    some: bool
    parted: bool = False
    ends: list[Memory] = field(default_factory=list)


class _Walk:
    """One walk through a program. at: the values known at this point. some: only some threads get here. quiet: errors here
    are left to the walk of a smaller set of warp groups. loop: the enclosing T.Parallel."""

    def __init__(self, at: Values) -> None:
        self.at = at
        self.some = self.quiet = self.dead = False
        self.loop: Parallel | None = None
        self.left: Any = None  # the statement at which some threads have returned
        self.parting: Any = None  # the enclosing branch or loop that some threads do not enter
        self.loops: list[_Loop] = []  # those around
        self.steps = 0

    # ---- statements

    def stmt(self, s: Stmt | None) -> None:
        """Follow a statement, unless no thread reaches it."""
        if s is None or self.dead:
            return
        match s:
            case Seq():
                for x in s.stmts:
                    self.stmt(x)
            case Bind():
                self.reads(s.value, s)
                self.at.bind(s.var, s.value)
            case Alloc():
                if s.init is not None:
                    self.reads(s.init, s)
                varies = self.some or s.init is not None and self.at.varies(s.init)
                self.at.begin(s.buffer, VARIES if varies and s.init is not None else 0)
            case Store():
                self.store(s)
            case Evaluate():
                self.evaluate(s)
            case Assert():
                self.reads(s.cond, s)
            case If():
                self.branch(s)
            case For():
                self.counted(s)
            case While():
                self.reads(s.cond, s)
                self.fixpoint(s, self.at.varies(s.cond), False)
            case Parallel():
                self.parallel(s)
            case TileOp():
                self.tile_op(s)
            case Break() | Continue():
                if self.loops:
                    self.loops[-1].ends.append(self.memory())
                    self.loops[-1].parted |= self.some and not self.loops[-1].some
                self.dead = True

    def store(self, s: Store) -> None:
        for e in (*s.indices, s.value):
            self.reads(e, s)
        if self.at.follows(s.buffer):
            varies = self.some or self.at.varies(s.value) or any(map(self.at.varies, s.indices))
            self.at.put(s.buffer, self.at.places(s.buffer, s.indices), (VARIES if varies else 0) | self.mark)

    def evaluate(self, s: Evaluate) -> None:
        if s.call.op == "thread_return":
            if self.some:
                self.left = s
            self.dead = True
            return
        self.reads(s.call, s)
        for x in expr_effects(s.call):
            if isinstance(x.node, Call) and self.at.follows(x.buffer) and x.writes:
                # The value that the call stores there is unknown; a function of the user may fill all of it.
                known = INTRINSICS.get(x.node.op) is not None
                bits = VARIES if self.some or known or any(map(self.at.varies, x.node.args)) else 0
                self.at.memory[x.storage] = np.full_like(self.at.memory[x.storage], bits | self.mark)

    def branch(self, s: If) -> None:
        self.reads(s.cond, s)
        holds = self.at.answer(s.cond)
        if holds is not None:
            self.stmt(s.then if holds else s.orelse)
            return
        mixed = self.at.mixed(s.cond)
        some, quiet, entry, left = self.some, self.quiet, self.memory(), self.left
        self.some, self.quiet = some or mixed or self.at.varies(s.cond), quiet or mixed
        self.parting = self.parting if some else s
        self.stmt(s.then)
        one, dead, left_one = self.memory(), self.dead, self.left
        self.at.memory, self.dead, self.left = entry, False, left
        self.stmt(s.orelse)
        if self.dead or not dead:
            self.at.memory = one if self.dead else _joined(one, self.at.memory)
        self.dead = self.dead and dead
        self.some, self.quiet, self.left = some, quiet, self.left or left_one

    # ---- loops

    def counted(self, s: For) -> None:
        for e in controls(s):
            self.reads(e, s)
        varies = any(map(self.at.varies, controls(s)))
        start, extent = self.at.value(s.start), self.at.value(s.extent)
        if extent is not None and extent <= 0:
            return
        size = sum(1 for _ in statements(s.body))
        if start is not None and extent is not None and self.steps + int(extent) * size <= _STEPS and any(
                n.buffer.scope_name in PRIVATE for n in walk(s.body, Load, Store, AddressOf)):  # else all iterations are alike
            for some in (self.some, True):
                entry, saved, around = self.memory(), self.steps, self.some
                self.parting = self.parting if around else s
                self.enter(some)
                for k in range(int(start), int(start) + int(extent)):
                    self.at.known[s.var] = k
                    self.at.varying.discard(s.var)
                    self.steps += size
                    self.once(s.body)
                self.some = around
                if not self.loops.pop().parted:
                    return
                self.at.memory, self.steps = entry, saved
            return
        self.at.known.pop(s.var, None)
        self.at.varying.add(s.var) if varies else self.at.varying.discard(s.var)
        self.fixpoint(s, varies, extent is not None)

    def fixpoint(self, s: For | While, varies: bool, surely: bool) -> None:
        """Follow a loop whose iterations are treated alike, until a fixpoint. surely: it runs at least once."""
        around, entry = self.some, self.memory()
        some = around or varies
        before = entry
        while True:  # terminates: knowledge of memory only shrinks
            self.at.memory, self.dead = dict(before), False
            returned = self.left
            self.parting = self.parting if around else s
            self.enter(some)
            self.once(s.body)
            if isinstance(s, While):
                self.reads(s.cond, s)
            some |= self.loops.pop().parted
            after = self.memory()
            more = _joined(before, after)
            if _same(more, before) and some == self.some and self.left is returned:
                break
            before, self.some = more, some
        self.some = around
        if not surely:
            self.at.memory, self.dead = _joined(entry, after), False

    def enter(self, some: bool) -> None:
        self.loops.append(_Loop(some))
        self.some = some

    def once(self, body: Stmt) -> None:
        """Follow one iteration and join the states of all its exits."""
        self.stmt(body)
        if ends := self.loops[-1].ends:
            self.at.memory = reduce(_joined, ends if self.dead else [*ends, self.at.memory])
            self.dead, self.loops[-1].ends = False, []

    def parallel(self, s: Parallel) -> None:
        self.of_all(s)
        for e in s.extents:
            self.uniform(e, s, "T.Parallel")
        entry, known, steps = self.memory(), self.at.known, self.steps
        around = self.loop, self.some, self.left, self.at.iteration, self.quiet
        self.loop, self.some, self.at.iteration = s, False, True
        stored: Memory = {}
        probes = any(self.at.follows(x.buffer) for x in walk(s.body, Store, AddressOf))
        for self.quiet in (True, around[-1]) if probes else (around[-1],):  # what one iteration stores, another one may read
            self.at.known, self.steps = {v: x for v, x in known.items() if v not in s.vars}, steps
            self.at.memory = {data: bits & ~np.uint8(STORED) | stored.get(data, np.uint8(0)) for data, bits in entry.items()}
            self.enter(False)
            self.once(s.body)
            self.loops.pop()
            self.dead = False
            stored = {data: self.at.memory[data] // np.uint8(STORED) * np.uint8(STALE) for data in entry}
        self.loop, self.some, self.left, self.at.iteration, self.quiet = around
        self.at.memory = {data: bits | stored[data] for data, bits in entry.items()}

    # ---- tile operations

    def tile_op(self, s: TileOp) -> None:
        accesses = s.accesses()  # type: ignore[attr-defined]
        operands = [e for c in children(s) for e in ((*c.mins, *c.extents) if isinstance(c, Region) else (c,))
                    if isinstance(e, Expr)]
        for e in operands:
            self.reads(e, s)
        own = any(a.region.buffer.scope_name in PRIVATE for a in accesses)  # private operands: a thread may use its own piece
        if not own and not (isinstance(s, Copy) and s.plan.by_hand):
            self.of_all(s)
            for e in operands:
                self.uniform(e, s, f"T.{s.op_name}")
        varies = self.some or any(map(self.at.varies, operands))
        for a in accesses:
            if a.mode != "write" and self.at.follows(a.region.buffer):
                at = self.at.region(a.region)
                held = self.at.memory[a.region.buffer.data]
                bits = int(np.bitwise_or.reduce(held if at is None else held[at]))
                varies |= bool(bits & VARIES)
                self.fresh(bits, a.region.buffer, s)
        for a in accesses:
            if a.mode != "read" and self.at.follows(a.region.buffer):
                self.at.put(a.region.buffer, self.at.region(a.region), VARIES if varies else 0)

    # ---- what is rejected

    def reads(self, e: Expr, s: Stmt) -> None:
        """An expression is evaluated: check what it reads."""
        if self.loop is not None and not (isinstance(e, Call) and e.op in _SPEAKS):
            self.uniform(e, s, "")
        for x in expr_effects(e) if self.at.memory else ():
            known = isinstance(x.node, Load) or isinstance(x.node, Call) and INTRINSICS.get(x.node.op) is not None
            if known and self.at.follows(x.buffer) and x.reads:
                self.fresh(self.at.bits(x.buffer, x.indices), x.buffer, s)

    def fresh(self, bits: int, b: Buffer, s: Stmt) -> None:
        """Private memory is read: reject values that another iteration stored there."""
        if not bits & STALE or self.quiet:
            return
        span = getattr(s, "span", None)
        if self.loop is not None:
            raise error("parallel-carried", f"`{b.name}` carries a value from one iteration of T.Parallel to the next",
                        found=f"`{b.name}`, read before the iteration writes it", span=span or self.loop.span,
                        notes=((self.loop.span, "the parallel loop"),))
        raise error("parallel-left", f"`{b.name}` is read after the T.Parallel loop that set it, and iterations belong to no "
                    "thread", found=f"`{b.name}` as an iteration left it", span=span)

    def uniform(self, e: Any, s: Stmt, what: str) -> None:
        """Reject a value on which all threads must agree where it differs between them."""
        if self.quiet or not self.at.varies(e):
            return
        cause = self.at.cause(e)
        name = f"T.{cause.op}" if isinstance(cause, Call) else f"`{getattr(getattr(cause, 'buffer', cause), 'name', cause)}`"
        notes = () if self.loop is None else ((self.loop.span, "the parallel loop"),)
        raise error("parallel-thread", f"{name} differs between the threads that take part in {what or 'T.Parallel'}",
                    found=f"{name}, a value of each thread", span=getattr(s, "span", None), notes=notes)

    def of_all(self, s: Parallel | TileOp) -> None:
        """Reject work of the whole block where not all of its threads reach it."""
        what = s.op_name if isinstance(s, TileOp) else "T.Parallel"
        if self.some and not self.quiet:
            raise error("collective-divergent", f"{what} takes all threads of the block, and only some threads get here",
                        found=taken(self.parting, self.at.launch) if self.at.launch is not None else None,
                        span=getattr(s, "span", None),
                        notes=((getattr(self.parting, "span", None), "entered by some threads only"),))
        if self.left is not None and not self.quiet:
            raise error("collective-divergent", f"{what} takes all threads of the block, and some of them have returned",
                        span=getattr(s, "span", None), notes=((getattr(self.left, "span", None), "some threads return here"),),
                        hint="let them go on, and put a condition around what the others do by themselves")

    def memory(self) -> Memory:
        return dict(self.at.memory)

    @property
    def mark(self) -> int:
        return 0 if self.loop is None else STORED


def _joined(a: Memory, b: Memory) -> Memory:
    """The facts that hold on both of two paths."""
    return {**b, **{k: v if k not in b or v is b[k] else v | b[k] for k, v in a.items()}}


def _same(a: Memory, b: Memory) -> bool:
    return a.keys() == b.keys() and all(v is b[k] or np.array_equal(v, b[k]) for k, v in a.items())


# ---- values of threads ----------------------------------------------------------------------------------------------------
# Which values differ between the threads of a block, or of a branch by warp group, at each point of a program.
#
# Private arrays and variables are followed element by element and in execution order: the last store counts. Values from memory
# and from votes of the block are the same for all threads, as long as all read the same element.


Memory = dict[Var, np.ndarray]
"""A byte for each element of a private array: STALE, what it holds is an iteration's of T.Parallel that is over;
VARIES, it may differ between the threads; STORED, an iteration of the T.Parallel that is followed stored it."""


@state
class Values:
    """The facts that hold at one point of the program.

    launch, groups: the threads that run it (None: host code, one thread). varying: variables that differ between them.
    known: variables whose number is known. plain: variables computed from numbers alone. swapped: variables that are
    T.shfl_xor of a value. iteration: inside an iteration of T.Parallel, where an atomic's result belongs to the iteration.
    """

    launch: Launch | None = None
    warps: tuple[int, ...] = ()
    memory: Memory = field(default_factory=dict)
    varying: set[Var] = field(default_factory=set)
    known: dict[Var, Any] = field(default_factory=dict)
    plain: dict[Var, Expr] = field(default_factory=dict)
    swapped: dict[Var, Expr] = field(default_factory=dict)
    iteration: bool = False
    dtypes: dict[Var, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.threads, ranges = 1, {}
        if self.launch is not None:
            n = self.launch.num_threads
            low, high = min(self.warps) * WARP_LANES, min(n, (max(self.warps) + 1) * WARP_LANES)
            self.threads = min(n, len(self.warps) * WARP_LANES)
            for v, k in zip(self.launch.thread_vars, self.launch.threads):
                ranges[v] = (0, k - 1)
            if self.launch.threads[1:] == (1, 1):
                ranges[self.launch.thread_vars[0]] = (low, high - 1)
            self.varying |= {v for v, (a, b) in ranges.items() if a != b}
        self.analyzer = Analyzer(ranges)

    # ---- values

    def bind(self, v: Var, e: Expr) -> None:
        """v equals e from here on."""
        if self.varies(e):
            self.varying.add(v)
        else:
            self.varying.discard(v)
        value = self.value(e)
        if value is None:
            self.known.pop(v, None)
        else:
            self.known[v] = value
        if not contains(e, Load, Call, AddressOf):
            self.plain[v] = substitute(e, self.plain)
        elif isinstance(e, Call) and e.op == "shfl_xor":
            self.swapped[v] = e

    def value(self, e: Any) -> Any:
        """The number, or the value per lane, of an expression; None where unknown."""
        if not isinstance(e, Expr):
            return e
        if isinstance(e, Const):
            return e.value
        if isinstance(e, Var):
            return self.known.get(e)
        return computed(e, self.known)

    def answer(self, cond: Expr) -> bool | None:
        """The value of a condition for all threads that are here; None where only the run of the program decides it."""
        got = {holds_in(cond, w) for w in self.warps}
        if len(got) == 1 and None not in got:
            return got.pop()
        value = self.value(cond)
        return None if value is None or np.ndim(value) else bool(value)

    def mixed(self, cond: Expr) -> bool:
        """Whether a condition differs between the warps that are here."""
        return len({holds_in(cond, w) for w in self.warps}) > 1

    def varies(self, e: Any) -> bool:
        """Whether the threads that are here may compute different values."""
        return self.threads > 1 and self._varies(e)

    def _varies(self, e: Any) -> bool:
        if isinstance(e, Const):
            return False
        if isinstance(e, Var):
            return e in self.varying
        if isinstance(e, Buffer):
            return self.elsewhere(e)
        if isinstance(e, Load):
            if any(map(self._varies, e.indices)) or self.elsewhere(e.buffer):
                return True
            return bool(self.bits(e.buffer, e.indices) & VARIES)
        if isinstance(e, Call):
            return self._call(e)
        if isinstance(e, Binary) and self._reduced(e):
            return False
        return any(self._varies(c) for c in children(e)) and not self._one(e)

    def _call(self, e: Call) -> bool:
        row = INTRINSICS.get(e.op)
        if e.op in BLOCK_VOTES:
            return False
        if e.op == "in_warp_groups":
            return self.mixed(e)
        if e.op.startswith("get_") or e.op in ("elect_one", "shuffle_elect", *CLOCKS):
            return True
        if e.op.startswith("atomic_") and e.op != "atomic_load" and not self.iteration:
            return True  # each thread gets the old value of its own update
        if row is not None and row.effect == WARP and self.threads <= WARP_LANES:
            if e.op in ("any_sync", "all_sync", "ballot_sync", "ballot", "match_all_sync"):
                return False
            if e.op == "shfl_idx":
                return self._varies(e.args[1])
        return any(map(self._varies, e.args))

    def _reduced(self, e: Binary) -> bool:
        """Whether e is a step of a reduction over the lanes of the only warp: x + T.shfl_xor(x, n)."""
        if self.threads > WARP_LANES or e.op not in _COMBINE:
            return False
        for a, b in ((e.a, e.b), (e.b, e.a)):
            b = self.swapped.get(b, b) if isinstance(b, Var) else b
            if isinstance(b, Call) and b.op == "shfl_xor" and b.args[0].same(a):
                return True
        return False

    def _one(self, e: Any) -> bool:
        """Whether an expression of thread indices has the same value for all threads that are left."""
        if not isinstance(e, Expr) or not e.dtype.is_int and not e.dtype.is_bool or e.dtype.lanes != 1:
            return False
        if contains(e, Load, Call, AddressOf):
            return False
        full = substitute(e, self.plain)
        if e.dtype.is_bool:
            return isinstance(self.analyzer.simplify(full), Const)
        low, high = self.analyzer.interval(full)
        return low is not None and low == high

    def elsewhere(self, b: Buffer) -> bool:
        """Whether a buffer is at a different place for each thread: made from an address, or with an offset, that differs."""
        return b.data in self.varying or any(map(self._varies, b.exprs))

    def cause(self, e: Any) -> Node | None:
        """The subexpression that makes an expression differ between threads."""
        for c in children(e) if not isinstance(e, (Var, Buffer)) else ():
            if self._varies(c):
                return self.cause(c)
        return e if isinstance(e, Node) else None

    # ---- private memory

    def follows(self, b: Buffer) -> bool:
        """Whether b is private memory that is followed."""
        return b.scope_name in PRIVATE and b.data in self.memory

    def begin(self, b: Buffer, bits: int) -> None:
        """Private memory is allocated."""
        if b.scope_name in PRIVATE and b.is_static:
            self.memory[b.data] = np.full(max(int(b.size), 1), bits, np.uint8)
            self.dtypes[b.data] = b.dtype

    def places(self, b: Buffer, indices: Any) -> Any:
        """The elements of its memory that an access uses: their numbers, or all where unknown."""
        size, flat = len(self.memory[b.data]), self.value(b.offset)
        if flat is None or b.dtype != self.dtypes[b.data]:
            return None
        for i, n in zip(indices, b.strides):
            at, step = self.value(i), self.value(n)
            if at is None or step is None:
                return None
            flat = flat + np.asarray(at, np.int64) * int(step)
        flat = np.atleast_1d(flat).astype(np.int64)
        return flat if flat.size and flat.min() >= 0 and flat.max() < size else None

    def bits(self, b: Buffer, indices: Any) -> int:
        """The bits that any of the elements of an access has."""
        if not self.follows(b):
            return 0
        held, at = self.memory[b.data], self.places(b, indices)
        return int(np.bitwise_or.reduce(held if at is None else held[at]))

    def put(self, b: Buffer, at: Any, bits: int) -> None:
        """Elements are stored: those of `at`, or one unknown element."""
        if at is None:
            self.memory[b.data] = self.memory[b.data] | np.uint8(bits)
        else:
            self.memory[b.data] = self.memory[b.data].copy()
            self.memory[b.data][at] = bits

    def region(self, r: Any) -> Any:
        """The elements of a region, as `places` gives them."""
        mins, extents = [self.value(m) for m in r.mins], [self.value(n) for n in r.extents]
        if any(x is None for x in (*mins, *extents)):
            return None
        axes = np.indices([int(n) for n in extents]).reshape(len(extents), -1)
        return self.places(r.buffer, [int(m) + a for m, a in zip(mins, axes)])
