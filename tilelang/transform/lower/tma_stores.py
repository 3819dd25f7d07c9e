"""The TMA stores of one launch: which tensors they may write, their staging buffers, and what must be awaited.

A TMA store is asynchronous: it reads shared memory and writes the tensor some time after it was issued.  Therefore

- a tensor that is written by TMA is touched by these stores alone, each element by at most one of them; any other tensor
  is written by ordinary stores, and the report of the launch gives the reason;
- where a loop may write the same elements again, the earlier store is awaited until it is complete;
- the staging buffers carry the attr `ordered` (docs/internals/scheduling.md, "Epilogue");
- the threads that issued stores wait, at the end of their warp role, until shared memory has been read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import gcd
from typing import Any

from tilelang.arith import Analyzer, Linear, launch_analyzer
from tilelang.ir import (Alloc, Bind, Binary, Buffer, Call, Cast, Evaluate, Expr, For, If, Launch, Region, Stmt, Var, While,
                         binary, call, cast, const, contains, convert, dtype, extent, free_vars, fresh, is_large, rewrite, seq,
                         substitute, walk, BufferFacts, Load, DYNAMIC, GLOBAL)
from tilelang.ops import AtomicTile, Copy, Reduce
from tilelang.ops.tma_store import BOX_ROW, ROWS_OF_STEP, uses_group_barriers
from tilelang.target.warp_groups import GROUP, PER_GROUP

from ..analysis.disjoint import Disjoint, Place
from ..analysis.effects import effects
from ..legalize.hopper_features import placed_in_kernel
from ..analysis.vectorize import stride_along

MOST_GROUPS = 8  # each needs a named barrier
_SHORT = 100  # nodes of an expression in place of its name


class TmaStores:
    """State of the TMA stores while one launch is lowered.

    on: whether TMA may be used.  strides: see Hopper.  buffers: staging buffers of a warp group, each for one TMA box (0:
    none).  steps: staging buffers that the largest sub-tile of a warp group takes.
    reports: lines for the report of the launch.
    one_group: whether the block is one warp group.  first_group: number of the first warp group of the warp role being
    lowered, which has whole_groups.  issued: one of so many threads of that warp role issues stores, 0: none.
    """

    def __init__(self, launch: Launch, on: bool, buffers: int, strides: bool = False) -> None:
        self.launch, self.buffers, self.strides, self.steps = launch, buffers, strides, 0
        x, y, z = launch.threads
        self.one_group = x * y * z == GROUP
        on = on or asks_for_tma(launch)
        self.on = on and not any(x.op == "thread_return" for x in walk(launch.body, Call))
        self.reports: dict[str, None] = {}
        self.first_group, self.issued, self.whole_groups = 0, 0, True
        self.stages: dict[tuple[Any, ...], Buffer] = {}
        self.loops: list[For | While] = []
        self.analyzer = Analyzer()  # knows no ranges
        self.disjoint_writes: dict[Var, bool] = {}  # see _all_disjoint

    def reason(self, tensor: Buffer) -> str:
        """The reason reported for a tensor, without its name; "" when there is none."""
        return next((t.split(": ", 1)[1] for t in (*self.launch.plan.report, *self.reports)
                     if t.startswith(f"`{tensor.name}` is written")), "")

    # ---- which tensors --------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the report of the launch."""
        self.reports[text] = None

    def unsupported(self, op: Any, tensor: Buffer) -> str:
        """Why an op may not write its tensor by TMA, given the rest of the program; "" when it may."""
        if not tensor.facts.symmetric and (late := self.placed(tensor)):  # bulk copies need no map
            return f"the {late} of `{tensor.name}` is known in the kernel only"
        others, writers = self.writers.get(tensor.data, ("", []))
        if others:
            return f"`{tensor.name}` is also {others} in another way"
        if self.kinds.get(tensor.data, _kind(op)) != _kind(op):
            return f"`{tensor.name}` is changed in two ways"
        if isinstance(op, Copy) and not self._all_disjoint(tensor.data) and any(
                not self._disjoint(op.dst, x.dst) for x in writers if x is not op):
            return f"two copies may write the same elements of `{tensor.name}`"
        return ""

    @cached_property
    def placed(self) -> Callable[[Buffer], str]:
        return placed_in_kernel(self.launch)

    @cached_property
    def writers(self) -> dict[Var, tuple[str, list[Any]]]:
        """By storage: how something else than copies and atomics of tiles accesses it first, and those that write to it."""
        out: dict[Var, tuple[str, list[Any]]] = {}
        for e in effects(self.launch.body):
            others, nodes = out.get(e.storage, ("", []))
            if not isinstance(e.node, (Copy, AtomicTile)) or e.region is not e.node.dst:
                out[e.storage] = others or ("written" if e.writes else "read"), nodes
            else:
                nodes.append(e.node)
                out[e.storage] = others, nodes
        return out

    @cached_property
    def kinds(self) -> dict[Var, Any]:
        """By storage: the kind of all its writers, None where they differ."""
        each = {b: {_kind(x) for x in nodes} for b, (_, nodes) in self.writers.items() if nodes}
        return {b: kinds.pop() if len(kinds) == 1 else None for b, kinds in each.items()}

    def _all_disjoint(self, tensor: Var) -> bool:
        """Whether all tiles that are written to a tensor are found disjoint along one dimension, by sorting."""
        if tensor not in self.disjoint_writes:
            regions = [x.dst for x in self.writers[tensor][1]]
            one = len({r.buffer for r in regions}) == 1
            self.disjoint_writes[tensor] = one and any(map(self._spans_disjoint, zip(*(r.mins for r in regions)), zip(*(
                r.extents for r in regions))))
        return self.disjoint_writes[tensor]

    def _spans_disjoint(self, mins: tuple[Any, ...], extents: tuple[Any, ...]) -> bool:
        """Whether the intervals of a dimension have constant distances and do not meet."""
        if not all(isinstance(n, int) for n in extents):
            return False
        forms = [self.analyzer.linear(self.inlined(x)) for x in mins]
        if any(f.terms != forms[0].terms for f in forms):
            return False
        spans = sorted((f.const, f.const + n) for f, n in zip(forms, extents))
        period = self._period(forms[0]) or spans[-1][1] - spans[0][0]
        return all(end <= start for (_, end), (start, _) in zip(spans, [*spans[1:], (spans[0][0] + period, 0)]))

    @cached_property
    def moving(self) -> tuple[set[Var], dict[Var, Expr]]:
        """What may change in a block: written storage, variables of loops and those bound in them; the values of the bound."""
        loops = [s for s in walk(self.launch.body, For, While) if not isinstance(s, For) or not s.plan.tiles]
        values = {s.var: s.value for loop in loops for s in walk(loop.body, Bind)}
        written = (e.storage for e in effects(self.launch.body) if e.writes)
        return {*values, *written, *(s.var for s in loops if isinstance(s, For))}, values

    def inlined(self, x: Any, values: dict[Var, Expr] | None = None) -> Expr:
        """An index with the values of variables (by default those bound in loops), unless that is a large expression."""
        x, values = convert(x), self.moving[1] if values is None else values
        while not is_large(x) and not values.keys().isdisjoint(free_vars(x)):
            x = substitute(x, values)
        return x  # type: ignore[no-any-return]

    def _period(self, form: Linear) -> int:
        """A divisor of the distance of two values of an index in one block; 0 if it has one value."""
        return gcd(*(c for atom, c in form.terms.items() if not self.moving[0].isdisjoint(
            {*free_vars(atom), *(x.buffer.data for x in walk(atom, Load))})))

    @cached_property
    def known(self) -> Analyzer:
        """What knows the ranges of all variables."""
        return launch_analyzer(self.launch)

    def _disjoint(self, a: Region, b: Region) -> bool:
        """Whether two tiles are disjoint in any two iterations of the loops of a block."""
        if a.buffer is not b.buffer:
            return False
        changing, loaded = self.moving[0], dict[Expr, Var]()
        proof = Disjoint(self.known, None, {v: self.known.interval(v) for v in changing if v.dtype.is_int})
        loops = [s for s in walk(self.launch.body, For) if s.var in changing]
        wide = max((convert(x).dtype for r in (a, b) for x in r.mins), key=lambda t: t.bits)
        bounds = {s.var: [binary(op, _widened(cast(s.var, wide)), _widened(cast(substitute(convert(end), self.expanded), wide)))
                          for op, end in (("ge", s.start), ("lt", s.start + s.extent))] for s in loops}

        def value(x: Any) -> Expr:
            """A variable in place of what is loaded: of each iteration, where another one may load another value."""
            if x not in loaded:
                loaded[x] = fresh("loaded", x.dtype)
                if isinstance(x, Call) or x.buffer.data in changing or not changing.isdisjoint(free_vars(x)):
                    proof.add_inner(loaded[x], None, None)
            return loaded[x]

        def element(r: Region) -> Place:
            mins = [rewrite(_widened(substitute(self.inlined(x), self.expanded)), value, Load, Call) for x in r.mins]
            # Only bounds of loops that decide the place: a loop that never runs would prove whatever is asked.
            left, used = set().union(*map(free_vars, mins)), set[Var]()
            while here := (left & bounds.keys()) - used:
                used |= here
                left = set().union(*(free_vars(e) for v in here for e in bounds[v]))
            return proof.element(r.buffer, mins, r.extents, tuple(e for v, both in bounds.items() if v in used for e in both))

        return proof.proves(element(a), element(b))

    @cached_property
    def expanded(self) -> dict[Var, Expr]:
        """What names stand for, without names in it but those of longer expressions: of the place of a tile, as a rule."""
        out: dict[Var, Expr] = {}
        for s in walk(self.launch.body, Bind):
            value = substitute(s.value, out)
            if extent(value)[0] <= _SHORT:
                out[s.var] = value
        return out

    @property
    def alone(self) -> bool:
        """Whether the launch has only one copy or atomic to global memory."""
        return sum(x.dst.buffer.scope_name == GLOBAL for x in walk(self.launch.body, Copy, AtomicTile)) == 1

    @cached_property
    def once(self) -> bool:
        """Whether a block stores one whole tile and nothing else: its staging buffers may lie where operands were.

        Not where groups reduce rows of their own between GEMMs: they end at different times, and none should wait for the
        last one before it stages its results (attention of one wave: 1 to 2 %).
        """
        def stores(body: Stmt) -> list[Any]:
            return [x for x in walk(body, Copy, AtomicTile) if x.dst.buffer.scope_name == GLOBAL]

        return self.alone and all(isinstance(x, Copy) and x.src.is_full for x in stores(self.launch.body)) and not any(
            stores(s.body) or contains(s.body, Reduce) for s in walk(self.launch.body, For, While))

    @property
    def around(self) -> list[For | While]:
        """The loops around the statement that is lowered, without those over tiles."""
        return [s for s in self.loops if not isinstance(s, For) or not s.plan.tiles]

    def again(self, dst: Region) -> bool:
        """Whether the surrounding loops may write the same elements a second time."""
        if not (around := self.around):
            return False
        if len(around) > 1 or not isinstance(around[0], For):
            return True
        var = around[0].var
        for low, n in zip(map(self.inlined, dst.mins), dst.extents):
            step = stride_along(low, var, self.analyzer) if not contains(low, Load) else 0
            if step is not None and isinstance(n, int) and abs(step) >= n and step:
                return False
        return True

    # ---- staging --------------------------------------------------------------------------------------------------

    def room(self) -> str:
        """Why there can be no staging buffers; "" when there can."""
        x, y, z = self.launch.threads
        if x * y * z > MOST_GROUPS * GROUP:
            return "there are too many warp groups"
        if not self.whole_groups:
            return "its warps are no whole warp groups"
        if self.names_barriers:
            return "the program chooses its barriers itself"
        return "" if self.buffers else "no shared memory is left for its staging"

    @cached_property
    def names_barriers(self) -> bool:
        return uses_group_barriers(self.launch)

    def staging(self, groups: int, number: int, dt: dtype, rows: int) -> Buffer:
        """Shared memory of `number` staging buffers of elements dt, reused by all such stores of the same warp groups.

        number: a multiple of the groups, whose barriers do not order the stores of others.  rows: of the box of one thread.
        """
        key = (self.first_group, groups, number, dt, rows)
        got = self.stages.get(key)
        if got is None:
            got = Buffer("staging", (number * ROWS_OF_STEP * BOX_ROW * 8 // dt.bits,), dt, DYNAMIC,
                         facts=BufferFacts(align=1024, ordered=True))
            self.stages[key] = got
        return got

    def allocs(self) -> list[Stmt]:
        """The allocations of the staging buffers."""
        return [Alloc(b) for b in self.stages.values()]

    # ---- walking --------------------------------------------------------------------------------------------------

    def inside(self, loop: For | While, work: Callable[[], Any]) -> Any:
        """The result of work(), run as the lowering of a loop's body."""
        self.loops.append(loop)
        try:
            return work()
        finally:
            self.loops.pop()

    def of_warps(self, first: int, count: int, thread: Expr, work: Callable[[], Stmt]) -> Stmt:
        """The result of work() for `count` warps from number `first` on, then the issuing threads' wait for their stores."""
        saved = self.first_group, self.issued, self.whole_groups
        self.first_group, self.issued = first // PER_GROUP, 0
        self.whole_groups = first % PER_GROUP == count % PER_GROUP == 0
        out = work()
        if self.issued:
            out = seq(out, finished(thread, self.issued), span=out.span)
        self.first_group, self.issued, self.whole_groups = saved
        return out


def _widened(e: Expr) -> Expr:
    """An index with conversions of its terms in place of those of operations: indices do not overflow."""
    def terms(c: Cast) -> Expr | None:
        x = c.value
        if not isinstance(x, Binary) or x.op not in ("add", "sub", "mul") or not 32 <= x.dtype.bits <= c.dtype.bits:
            return None
        return binary(x.op, _widened(cast(x.a, c.dtype)), _widened(cast(x.b, c.dtype)))

    return rewrite(e, terms, Cast)  # type: ignore[no-any-return]


def _kind(op: Any) -> Any:
    return type(op), op.kind if isinstance(op, AtomicTile) else None


def asks_for_tma(launch: Launch) -> bool:
    """Whether the program itself names TMA for an atomic that all threads reach."""
    return any(x.plan.use_tma for x in walk(launch.body, AtomicTile))


def finished(thread: Expr, every: int) -> Stmt:
    """A wait, in threads that issue TMA stores, one of `every`, until all stores of the thread have read shared memory."""
    return If(binary("eq", thread % every, const(0, thread.dtype)), Evaluate(call("bulk_wait", (), "void", n=0, read=True)))
