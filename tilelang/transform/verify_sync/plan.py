"""Facts about the synchronisation of a launch's statements, computed once for all runs of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from math import gcd, lcm, prod
from typing import Any, TypeVar

from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For, If, Launch,
                         Load, Node, Select, Seq, Stmt, Store, Var, While, children, contains, convert, leaves, walk, BARRIER,
                         LOCAL, VARIABLE, SHARED)
from tilelang.ir.evaluate import evaluate
from tilelang.target.tensor_map import tensor_maps_of

from .unknowns import VOTES, Uniform

T = TypeVar("T")
WAITS = frozenset(("sync_threads", "sync_grid", "rank_barrier", "named_barrier", "mbarrier_wait", "set_max_nreg",
                   "cluster_wait", "cluster_sync"))
EVENTS = WAITS | frozenset((
    "named_barrier_arrive", "mbarrier_init", "mbarrier_arrive", "mbarrier_expect_tx", "mbarrier_arrive_expect_tx",
    "fence_mbarrier_init", "fence_proxy_async", "sync_warp", "tma_load", "tma_store", "tma_reduce_add", "bulk_load",
    "bulk_store", "bulk_commit", "bulk_wait", "wgmma", "wgmma_fence", "wgmma_commit", "wgmma_wait", "cp_async",
    "cp_async_commit", "cp_async_wait", "wait_loads", "thread_return", "cluster_arrive", "cluster_wait", "cluster_sync",
    "mbarrier_arrive_remote", "mbarrier_complete_remote", "cluster_load", "cluster_store", "bulk_copy_cluster",
    "cp_async_mbarrier_arrive"))
# Programs that call one of these are checked by the model; others need block barriers only.
ASYNCHRONOUS = EVENTS - {"sync_threads", "sync_grid", "rank_barrier", "sync_warp", "cp_async", "cp_async_commit",
                         "cp_async_wait", "wait_loads", "thread_return"}
_BY_THREADS = ("cp_async", "cluster_load", "cluster_store")
_LANES = {"ldmatrix": 16, "stmatrix": 16}


def _once(fn: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
    """Decorator of a method: computes a fact about a statement of the launch, which keeps it alive, once."""
    def known(plan: Any, s: Any) -> T:
        table = plan.known[fn]
        got = table.get(id(s), table)  # itself: not known yet
        if got is table:
            got = table[id(s)] = fn(plan, s)
        return got  # type: ignore[no-any-return]

    return known


class Plan:
    """Facts about a launch: which statements matter, where shared buffers lie, how long its rings are."""

    def __init__(self, launch: Launch, nodes: list[Node], sizes: dict[Var, int] | None = None) -> None:
        """sizes: values of the symbols on which the sizes and places of shared buffers depend."""
        self.launch, self.nodes, self.sizes = launch, nodes, sizes or {}
        self.known: defaultdict[Callable[..., Any], dict[int, Any]] = defaultdict(dict)
        self._kinds: defaultdict[type, list[Any]] = defaultdict(list)
        for x in nodes:
            self._kinds[type(x)].append(x)
        self.allocs = [x.buffer for x in self.of(Alloc)]
        self.shared = [b for b in self.allocs if b.scope_name in SHARED]
        self.barriers = [b for b in self.allocs if b.scope_name == BARRIER]
        self.maps = {m.name: m for m in tensor_maps_of(launch)}
        self.places, self.size = self._places()
        lengths = self._ring_lengths()
        self.period = min(lcm(2, *(2 * n for n in lengths)), 64)
        self.matrix_registers = frozenset(
            a.buffer.data for x in self.of(Call) if x.op == "wgmma" for a in x.args[:2]
            if isinstance(a, AddressOf) and a.buffer.scope_name == LOCAL)
        self.addressed = {x.buffer.data for x in self.of(AddressOf)}  # what calls may change
        self.atomics = any(x.op.startswith("atomic_") for x in self.of(Call))
        self.granule = self._granule()
        # (store, first thread of the stream) pairs that have been checked for conflicts within one instruction
        self.stored: set[tuple[int, int]] = set()
        self.patterns: dict[tuple[Any, ...], Any] = {}  # of accesses by threads (touches.pattern)
        # Of an operand of a wgmma and its descriptor: first byte, and intervals of bytes relative to it.
        self.operands: dict[tuple[int, Any], tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._facts: dict[int, tuple[bool, bool, bool, bool]] = {}
        # Small moduli that select a stage or phase, the variables that they apply to, and by how much those are divided first.
        self.moduli = _moduli(self.of(Binary))
        # A loop over tiles finds its tile by divisions, which are not stages.
        rings = [x for x in self.of(For) if self.is_ring_loop(x) and not self.is_outer(x)]
        turns = [m for x in rings for m in self._mods(x) if m <= 16]
        # In a ring with several iterations per stage, the mbarrier phase changes after this many iterations.
        turns += [m * d // 2 for x in rings for m, used, d in self.moduli if x.var in used and m == 2 < d and m * d <= 32]
        self.stages = max((*lengths, *turns), default=1)

    def of(self, kind: type[T]) -> list[T]:
        """The nodes of a kind, in order."""
        return self._kinds.get(kind, [])

    def _ring_lengths(self) -> list[int]:
        """The length of the ring that each array of mbarriers is: of one whose elements constants name, what counters are taken
        modulo."""
        arrays = {b.data: int(b.shape[0]) for b in self.barriers}
        named = {x.buffer.data for x in self.of(AddressOf) if x.buffer.data in arrays and not all(
            isinstance(i, Const) for i in x.indices)}
        counted = [int(x.b.value) for x in self.of(Binary) if x.op in ("floormod", "truncmod") and isinstance(x.b, Const)
                   and isinstance(x.b.value, int) and 0 < x.b.value <= 16
                   and any(y.buffer.scope_name == VARIABLE for y in walk(x.a, Load))]
        return [n if data in named else min(n, max(counted, default=1)) for data, n in arrays.items()]

    def _places(self) -> tuple[dict[Var, int], int]:
        """Bytes where buffers start: as planned, others one after another."""
        places = {b.data: self._number(at) for b, at in self.launch.plan.shared_offsets}
        end = max((places[b.data] + self.bytes_of(b) for b in (*self.shared, *self.barriers)
                   if b.data in places), default=0)
        for b in (*self.shared, *self.barriers):
            if b.data not in places:
                places[b.data] = -(-end // 1024) * 1024
                end = places[b.data] + self.bytes_of(b)
        return places, end

    def _number(self, e: Any) -> int:
        return e if isinstance(e, int) else int(evaluate(convert(e), self.sizes))

    @_once
    def bytes_of(self, b: Buffer) -> int:
        """Bytes of a buffer."""
        return prod(map(self._number, b.shape)) * b.dtype.bytes

    @cached_property
    def held(self) -> dict[Var, Expr]:
        """What names and registers hold."""
        return _held(self.launch)

    @cached_property
    def uniform(self) -> Uniform:
        """Which values all threads have in common."""
        return Uniform(self.launch)

    @cached_property
    def voted(self) -> frozenset[Var]:
        """Names of votes of the block."""
        return frozenset(x.var for x in self.of(Bind) if any(c.op in VOTES for c in walk(x.value, Call)))

    def asks_vote(self, cond: Expr) -> bool:
        """Whether a condition is one on a vote of the block."""
        return any(c.op in VOTES for c in walk(cond, Call)) or any(v in self.voted for v in walk(cond, Var))

    @cached_property
    def waits_for_copies(self) -> bool:
        """Whether threads wait for their own cp.async."""
        return any(x.op == "cp_async_wait" for x in self.of(Call))

    @cached_property
    def votes(self) -> bool:
        """Whether votes of the block decide about synchronisation."""
        return any(self.facts(x)[2] and self.asks_vote(x.cond) for x in self.of(If))

    def names(self) -> list[tuple[int, int, str]]:
        """(first byte, end, name) of the shared buffers."""
        return [(self.places[b.data], self.places[b.data] + self.bytes_of(b), b.name) for b in self.shared]

    def _granule(self) -> int:
        """Bytes that divide the width and the place of every access by threads."""
        piece = 16
        accesses: list[Load | Store] = [*self.of(Load), *self.of(Store)]
        for x in accesses:
            if x.buffer.scope_name in SHARED:
                piece = gcd(piece, x.buffer.dtype.bytes * max([i.dtype.lanes for i in x.indices], default=1))
        for c in self.of(Call):
            if c.op not in EVENTS and c.op != "wgmma_descriptor" or c.op in _BY_THREADS:
                for a in c.args:
                    if isinstance(a, AddressOf) and a.buffer.scope_name in SHARED:
                        width = _LANES.get(c.op) or (c.options.bytes if c.op == "cp_async" else 0)
                        piece = gcd(piece, width or a.buffer.dtype.bytes)
        for b in self.shared:
            piece = gcd(piece, self.places[b.data])
        return piece

    def facts(self, x: Node) -> tuple[bool, bool, bool, bool]:
        """Four facts: (matters: touches shared memory or a variable, or orders; may block; orders; names matrix registers)."""
        hit = self._facts.get(id(x))
        if hit is None:
            if isinstance(x, Buffer):
                kind = x.scope_name
                hit = (kind in SHARED or kind == VARIABLE and not x.dtype.is_float, False, False,
                       x.data in self.matrix_registers)
            elif isinstance(x, Var):
                hit = (False, False, False, False)
            else:
                hit = (False, False, False, False)
                if isinstance(x, Call) and (x.op in EVENTS or x.op.startswith("syncthreads_")):
                    waits = x.op in WAITS or x.op.startswith("syncthreads_")
                    hit = (True, waits, x.op != "cp_async", False)
                for c in children(x):
                    a = self.facts(c)
                    hit = (hit[0] or a[0], hit[1] or a[1], hit[2] or a[2], hit[3] or a[3])
            self._facts[id(x)] = hit
        return hit

    @_once
    def registers(self, x: Node) -> tuple[frozenset[Var], frozenset[Var]]:
        """Matrix registers that ordinary statements below x (touch, write)."""
        touched: set[Var] = set()
        written: set[Var] = set()
        stack: list[Node] = [x]
        while stack:
            n = stack.pop()
            if not self.facts(n)[3] or isinstance(n, Call) and n.op in ("wgmma", "wgmma_pin"):
                continue
            if isinstance(n, (Load, Store, AddressOf)) and n.buffer.data in self.matrix_registers:
                touched.add(n.buffer.data)
                if not isinstance(n, Load):
                    written.add(n.buffer.data)
            stack += children(n)
        return frozenset(touched), frozenset(written)

    @_once
    def asked(self, s: Evaluate) -> list[Expr]:
        """The arguments of a call, or indices of its addresses, that touch something while they are computed."""
        return [e for a in s.call.args for e in (a.indices if isinstance(a, AddressOf) else (a,)) if self.facts(e)[0]]

    @_once
    def is_flat(self, s: For) -> bool:
        """Whether a loop's iterations, few and without order or branches, are followed at once: their accesses are disjoint as
        the program guarantees, or reads."""
        few = isinstance(s.extent, Const) and isinstance(s.start, Const) and int(s.extent.value) <= 64
        return few and not self.facts(s.body)[2] and (s.plan.independent or _only_reads(s.body)) and not any(
            isinstance(x, (If, While, Break, Continue)) or isinstance(x, For) and not self.is_flat(x) and self.facts(x)[0]
            for x in walk(s.body))

    @cached_property
    def asks_for_block(self) -> bool:
        """Whether shared addresses, or which statements that matter run, depend on the number of the block."""
        names = set(self.launch.block_vars)

        def asks(*exprs: Node) -> bool:
            return any(x in names for e in exprs for x in walk(e, Var))

        for x in self.nodes:
            if isinstance(x, Bind):
                if asks(x.value) and not contains(x.value, Load):
                    names.add(x.var)
            elif isinstance(x, (Load, Store, AddressOf)):
                if x.buffer.scope_name in SHARED and asks(*x.indices):
                    return True
                if isinstance(x, Store) and x.buffer.scope_name == VARIABLE and self.facts(x)[0] and asks(x.value):
                    return True
            elif isinstance(x, (If, While, Select, For)) and self.facts(x)[0] and (
                    asks(x.start, x.extent) if isinstance(x, For) else asks(x.cond)):
                return True
        return False

    def is_ring_loop(self, s: Stmt) -> bool:
        """Whether a loop takes part in the program's synchronisation."""
        return isinstance(s, (For, While)) and self.facts(s.body)[2]

    def waits_nowhere(self, s: Stmt) -> bool:
        """Whether a statement orders and touches nothing, or has no statements in it and waits for nothing."""
        matters, waits, _, _ = self.facts(s)
        return not matters or not waits and not isinstance(s, (Seq, If, For, While))

    @_once
    def followed(self, s: Seq) -> list[tuple[Stmt, bool, tuple[bool, bool, bool, bool]]]:
        """The statements of a Seq that the model follows, each with whether it waits nowhere, and its facts."""
        return [(x, self.waits_nowhere(x), self.facts(x)) for x in s.stmts
                if self.facts(x)[0] or self.facts(x)[3] or isinstance(x, (Bind, Seq)) or self.leaves(x)]

    @_once
    def skeleton(self, s: Seq) -> list[Stmt]:
        """The statements of a Seq that decide how often ring loops run."""
        return [x for x in s.stmts if isinstance(x, Bind) and x.var in self.deciding
                or isinstance(x, (Seq, If, For, While)) and self.facts(x)[2]]

    @cached_property
    def deciding(self) -> set[Var]:
        """The names on which the numbers of iterations of ring loops depend, directly or through other names."""
        made = {x.var: [x.value] for x in self.of(Bind)}
        made.update((x.var, [x.start, x.extent]) for x in self.of(For))
        open_ = [e for x in self.of(For) if self.is_ring_loop(x) for e in (x.start, x.extent)]
        names: set[Var] = set()
        while open_:
            new = set(walk(open_.pop(), Var)) - names
            names |= new
            open_ += [e for v in new for e in made.get(v, ())]
        return names

    @cached_property
    def phases(self) -> list[tuple[int, set[Var], int]]:
        """The small moduli, as in `moduli`, that select an mbarrier or its phase, by names too."""
        made = {x.var: x.value for x in self.of(Bind)}
        nodes: dict[int, Binary] = {}
        open_, names = [a for x in self.of(Call) if x.op.startswith("mbarrier") for a in x.args], set[Var]()
        while open_:
            e = open_.pop()
            nodes.update((id(x), x) for x in walk(e, Binary))
            new = {v for v in walk(e, Var) if v in made} - names
            names |= new
            open_ += [made[v] for v in new]
        return _moduli(list(nodes.values()), made)

    @_once
    def leaves(self, s: Stmt) -> bool:
        """Whether a statement may leave the loop around it."""
        return leaves(s)

    @_once
    def alike(self, s: For) -> list[For]:
        """The loops that warp roles run for one loop of the program: they leave out the same iterations."""
        return [x for x in self.of(For) if x is s or s.span is not None and x.span == s.span or s.plan.tiles and x.plan.tiles]

    @_once
    def is_outer(self, s: For) -> bool:
        """Whether a ring loop has ring loops inside, in any warp role: its iterations may start anywhere in the rings."""
        return any(self.facts(x.body)[1] for a in self.alike(s) for x in walk(a.body, For, While))

    @_once
    def unit(self, s: For) -> int:
        """Iterations of a ring loop after which the program is in the same state: whole periods of the rings."""
        alike = {x.var for x in self.alike(s)}
        if self.is_outer(s):
            turns = [n * d for n, used, d in self.phases if used & alike and n * d <= 64]
            return min(lcm(1, *turns, *(n for n, used, _ in self.moduli if used & alike)), 128)
        return min(lcm(self.period, *(m for n, used, d in self.moduli if used & alike for m in (n, n * d) if m <= 64)), 128)

    @_once
    def slots(self, s: For) -> tuple[int, int]:
        """(iterations of a loop in which slots that small moduli choose have all met each other, period of the slots)."""
        mods = [m for m in self._mods(s) if m <= 16]
        return max(mods, default=1) + 1, lcm(1, *mods)

    def _mods(self, s: For) -> list[int]:
        """The small moduli by which a loop's variable selects stages and phases."""
        return [n for n, used, _ in self.moduli if s.var in used]


def _only_reads(s: Stmt) -> bool:
    """Whether a statement writes neither shared memory nor variables of threads."""
    return not any(isinstance(x, Store) and x.buffer.scope_name in (*SHARED, VARIABLE) or isinstance(x, Call)
                   and x.op != "ldmatrix" and any(isinstance(a, AddressOf) for a in x.args) for x in walk(s))


def _moduli(nodes: list[Binary], made: dict[Var, Expr] | None = None) -> list[tuple[int, set[Var], int]]:
    """(modulus, names in what it divides, their divisor) of nodes.  made: what stands for names, whose own names count then."""
    known: dict[Var, tuple[set[Var], int]] = {}

    def below(e: Node) -> tuple[set[Var], int]:
        """The names in an index, and the factor by which it is divided: 8 for (k // 4 + 1) // 2."""
        if isinstance(e, Var):
            value = None if made is None else made.get(e)
            if e not in known:
                known[e] = ({e}, 1) if value is None else below(value)
            return known[e]
        found = [below(x) for x in children(e)]
        inside = lcm(1, *(d for _, d in found))
        if isinstance(e, Binary) and e.op in ("floordiv", "truncdiv") and isinstance(e.b, Const):
            inside *= max(1, int(e.b.value))
        return {v for names, _ in found for v in names}, inside

    return [(int(x.b.value), *below(x.a)) for x in nodes
            if x.op in ("floormod", "truncmod") and isinstance(x.b, Const) and isinstance(x.b.value, int)
            and 0 < x.b.value <= 64]


def follows(nodes: list[Node]) -> bool:
    """Whether a launch needs the model.

    That is the case if it orders threads with more than block barriers and cp.async groups, or branches on warp groups.
    """
    return any(isinstance(x, Call) and (x.op in ASYNCHRONOUS or x.op == "in_warp_groups") for x in nodes)


def _held(launch: Launch) -> dict[Var, Expr]:
    """The expressions that names stand for, and the contents of registers that only one statement writes."""
    out: dict[Var, Any] = {}
    for x in walk(launch.body):
        if isinstance(x, Bind):
            out[x.var] = x.value
        elif isinstance(x, Store) and x.buffer.scope_name == LOCAL:
            out[x.buffer.data] = None if x.buffer.data in out else x.value
        elif isinstance(x, AddressOf):
            out[x.buffer.data] = None
    return {k: v for k, v in out.items() if v is not None}
