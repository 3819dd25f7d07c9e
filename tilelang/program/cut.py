"""Which tensors are computed by one kernel: fusion by cost.

At first every reduction, every computed operand of a contraction and every output is a kernel of its own.  Then, from the
outputs backwards, a tensor is not stored any more, but computed where it is read, if that costs less:

    cost of a kernel = max(multiply-adds of contractions / their rate + other operations / theirs, bytes / bandwidth) + launch

Recomputation, traffic, and what does not fit into tiles (nest.Unfit) decide; no rule knows what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from math import inf, prod
from typing import TypeAlias

from tilelang.errors import TileLangError, error
from tilelang.library.gemm.tile import chip_of
from tilelang.target import Target

from .blocks import Block
from .divide import are_halves, in_halves, over_blocks
from .expand import Program
from .expr import FREE, HEAVY, Axis, Scalar, Tensor, axis, const, linear, number, reached, read, walk
from .graph import Dim, Size, size_at
from .nest import REDUCTIONS, Nest, Unfit, base_of, nest_of, output_axes, passes
from .plan import MODEL, MULTIPLE, AxisUse, Choice, Plan, bits_of, exactness, is_plain, is_window, main_contraction, plan_of
from .rescale import NEUTRAL, is_float
from .stateful import StepsPlan, plan_of_steps
from .storing import beside_last, reordered

GUESS = 1024  # what an open size is taken for: a small one, so that arrays of several open sizes stay in kernels
REREAD = 0.2  # bytes that the cache serves, beside those of memory
NOT_HIDDEN = 0.3  # of other operations under those of GEMMs
WAVES = (1, 2, 4)  # blocks that the pieces of a divided loop give each processor
MOST_DIVIDED = 2  # loops of a kernel, one behind the other, that are divided
EXACT = {"": 1.4, "halves": 10.0, "stored": 8.0, "threads": 16.0}  # times a multiply-add of 16-bit operands at the highest rate
SECTOR = {True: 32, False: 64}  # bytes of memory that are read at least, on a GPU and else
OTHER = {True: 256.0, False: 32.0}  # operations of float32 a cycle and processor, on a GPU and else
THREADS = 2  # of the CPU's pool at least: a text does not depend on the machine that wrote it
BY_COLUMN = 64  # threads that compute what each column of an accumulator needs, where its columns are looped over
RESIDENT, COMPUTING = 4, 2  # blocks whose loads keep a processor's share of the memory busy: without GEMMs, and
# with GEMMs whose operands threads compute
WIDE, BESIDE, ALONE = 1.0, 8.0, 1000.0  # operations that threads could do while they load an element of a window
INVERSE = 30.0  # operations for an inverse that is neither infinite nor too small
HEAVIER = 4.0  # times an operation of float32
COMPUTED = {True: 100.0, False: 32.0}  # multiply-adds of tensor cores that threads take for an element in a loop of GEMMs
PLACED = 15  # times that for an element whose place is found by quotients that are no shifts


Kernels: TypeAlias = "list[tuple[tuple[Tensor, ...], Plan | StepsPlan | Block]]"  # tensors that each stores, and its plan
Planned: TypeAlias = tuple[Kernels, float, str]  # kernels of a group in their order, seconds, why there are none


@dataclass
class Cut:
    """Kernels in their order: the tensors that each stores, and its plan.  outputs: the tensors that are the results.

    groups: how many sets of kernels are planned by themselves.
    """

    kernels: Kernels = field(default_factory=list)
    outputs: tuple[Tensor, ...] = ()
    groups: int = 0


def not_compiled(group: tuple[Tensor, ...], why: str) -> TileLangError:
    """The error of tensors that no kernel can compute, at the user's line."""
    span = next((t.span for t in group if t.span is not None), None)
    return error("program-lowering", f"a tensor of the program is not compiled yet: ‹{why}›", span=span)


def cut(program: Program, target: Target, sizes: Mapping[str, int], choices: Sequence[Choice] = ()) -> Cut:
    """The kernels of a program; the first groups of them as chosen.  Raises program-lowering where none computes a tensor."""
    return _Cutter(program, target, sizes).cut(choices)


class _Cutter:
    def __init__(self, program: Program, target: Target, sizes: Mapping[str, int]) -> None:
        self.target, self.sizes, self.chip = target, sizes, chip_of(target)
        self.processors = self.chip.sms if target.is_gpu else THREADS
        self.program, self.made = program, program.made
        self.outputs = tuple(t for t in program.outputs if t.body is not None)  # those without an element need no kernel
        self.plans: dict[tuple[tuple[Tensor, ...], frozenset[Tensor]], Planned] = {}

    def cut(self, choices: Sequence[Choice] = ()) -> Cut:
        loops = list(dict.fromkeys(t.attrs["steps"] for t in self.made if "steps" in t.attrs))
        groups = [tuple(t for t in self.made if t.attrs.get("steps") is s) for s in loops]
        blocks = list(dict.fromkeys(t.attrs["block"] for t in self.made if "block" in t.attrs))
        groups += [tuple(b.results) for b in blocks]
        same = {t: t.body.value for t in self.outputs if t.body is not None and is_copy_of_item(t, t.body)}
        single: list[tuple[Tensor, ...]] = [(t,) for t in (*self.made, *self.outputs) if t.kind != "item" and t not in same]
        groups += single
        stored = frozenset(self.made) | frozenset(self.outputs)
        fixed = {r.value for s in loops for e in s.bodies() for r in e.reads} | {
            t for t in self.made if t.kind == "item" or "kept" in t.attrs} | {t for b in blocks for t in b.operands}
        together: set[Tensor] = set()
        for t in reversed([t for t in self.made if t not in fixed]):
            if t not in stored:
                continue
            best, found = self.total(groups, stored), frozenset[Tensor]()
            before = self.before(t, stored - fixed)
            for gone in ({t}, {t} | before, before):  # alone, with all that it is made of, or these alone
                cost = self.total([g for g in groups if g[0] not in gone], stored - gone)
                if cost <= best:
                    best, found = cost, frozenset(gone)
            groups, stored = [g for g in groups if g[0] not in found], stored - found
            together |= found if len(found) > 1 else set()
        for g in [g for g in single if g[0] in together]:  # what went with others may cost less alone
            if self.total([*groups, g], stored | {g[0]}) < self.total(groups, stored):
                groups, stored = [*groups, g], stored | {g[0]}
        groups = self.merged(groups, stored)
        wanted = {t for g in groups for t in self.needs(g, stored)} | set(self.outputs)  # others went with what reads them
        groups = [g if g[0] in fixed else tuple(t for t in g if t in wanted) or g for g in groups]
        stored &= {t for g in groups for t in g}
        out = Cut(outputs=tuple(same.get(t, t) for t in self.program.outputs))
        for k, g in enumerate(self.ordered(groups, stored)):
            kernels, _, why = self.plan(g, stored)
            if not kernels:
                raise not_compiled(g, why)
            if k < len(choices) and isinstance(kernels[0][1], Plan):
                try:
                    kernels = self.divided(nest_of(g, stored), choices[k])[0]
                except Unfit:
                    pass  # the default plan
            out.kernels += kernels
            out.groups += 1
        return out

    def before(self, t: Tensor, stored: frozenset[Tensor]) -> set[Tensor]:
        """The stored tensors that a tensor is made of."""
        return {*reached([t], lambda x: self.needs((x,), stored) & stored)} - {t}

    def merged(self, groups: list[tuple[Tensor, ...]], stored: frozenset[Tensor]) -> list[tuple[Tensor, ...]]:
        """Kernels of equal shapes that read the same tensors, or one the other's, become one where that costs less."""
        while True:
            for a, b in combinations(groups, 2):
                both = [g for g in groups if g not in (a, b)] + [a + b]
                if self.alike(a, b, stored) and self.total(both, stored) < self.total(groups, stored) and len(
                        self.ordered(both, stored)) == len(both):
                    groups = both
                    break
            else:
                return groups

    def alike(self, a: tuple[Tensor, ...], b: tuple[Tensor, ...], stored: frozenset[Tensor]) -> bool:
        shorter, longer = sorted(([s for s in g[0].shape if s != 1] for g in (a, b)), key=len)
        if "item" in (a[0].kind, b[0].kind) or any(s not in longer for s in shorter):
            return False
        x, y = self.needs(a, stored), self.needs(b, stored)
        if any("kept" in t.attrs for t in (x & set(b)) | (y & set(a))):
            return False
        return bool(x & y or x & set(b) or y & set(a))

    def needs(self, group: tuple[Tensor, ...], stored: frozenset[Tensor]) -> set[Tensor]:
        """Inputs and stored tensors that a kernel reads."""
        def read_by(t: Tensor) -> Iterable[Tensor]:
            if lies(t) and t not in group:
                return ()
            return [r.value for e in bodies_of(t) for r in e.reads if r.value.kind != "state"]

        def lies(t: Tensor) -> bool:
            return t in stored or t.kind == "input"

        return {t for t in reached(group, read_by) if lies(t)} - set(group)

    def ordered(self, groups: list[tuple[Tensor, ...]], stored: frozenset[Tensor]) -> list[tuple[Tensor, ...]]:
        """Kernels in an order in which each reads what earlier ones stored; those that cannot be ordered are left out."""
        out: list[tuple[Tensor, ...]] = []
        have: set[Tensor] = set()
        left = list(groups)
        while left:
            ready = next((g for g in left if all(t.kind == "input" or t in have for t in self.needs(g, stored))), None)
            if ready is None:
                return out
            out.append(ready)
            have |= set(ready)
            left.remove(ready)
        return out

    # ---- costs ----------------------------------------------------------------------------------------------------------

    def total(self, groups: Iterable[tuple[Tensor, ...]], stored: frozenset[Tensor]) -> tuple[int, float]:
        """(kernels that are not possible, estimated seconds of the others)."""
        costs = [self.plan(g, stored)[1] for g in groups]
        return sum(1 for c in costs if c == inf), sum(c for c in costs if c < inf)

    def plan(self, group: tuple[Tensor, ...], stored: frozenset[Tensor]) -> Planned:
        key = (group, stored & self.needs(group, stored))
        if key not in self.plans:
            try:
                if "block" in group[0].attrs:
                    self.plans[key] = [(group, group[0].attrs["block"])], self.chip.start, ""
                elif group[0].kind == "item":
                    self.plans[key] = [(group, plan_of_steps(group, stored, self.target))], self.chip.start, ""
                else:
                    self.plans[key] = (*self.divided(nest_of(group, stored)), "")
            except Unfit as e:
                self.plans[key] = [], inf, str(e)
        return self.plans[key]

    def divided(self, nest: Nest, choice: Choice = MODEL, depth: int = 0) -> tuple[Kernels, float]:
        """The kernel of a nest; or several that compute pieces of its first loop and combine them, where blocks are few.

        depth: loops in front of this one that were divided; behind some, none is.
        """
        plan = plan_of(nest, self.target, choice)
        found: list[tuple[Kernels, float]] = [([(tuple(base_of(t) for t, _ in nest.outputs), plan)], self.cost(plan))]
        found += self.stored_operands(nest, choice)
        blocks, most = self.blocks(plan, frozenset()), WAVES[-1] * self.processors
        reduced = {a for t in nest.stages if t.kind in NEUTRAL for a in t.over}
        uses = {a: plan.uses.get(a, AxisUse("loop", MULTIPLE)) for a in reduced}
        loops = frozenset(a for a in reduced if uses[a].kind in ("loop", "serial")) or frozenset(reduced)
        first = next(iter(passes(nest, loops)), None)
        if first is None or blocks * 2 > most or depth == MOST_DIVIDED:
            return min(found, key=lambda x: x[1])
        a = max(first.axes, key=lambda a: (uses[a].kind == "serial", self.number(a.extent)))
        multiple = {"loop": uses[a].size, "serial": 1}.get(uses[a].kind, MULTIPLE)
        waves = WAVES if self.target.is_gpu else WAVES[-1:]
        for count in sorted({int(k * self.processors / blocks) for k in waves} - {0, 1}):
            nests = over_blocks(nest, first, a, count, multiple)
            try:
                if nests is not None:
                    pieces = plan_of(nests[0], self.target, choice)
                    rest, cost = self.divided(nests[1], Choice(early=choice.early), depth + 1)
                    found.append(([(tuple(t for t, _ in nests[0].outputs), pieces), *rest], cost + self.cost(pieces)))
            except Unfit:
                continue
        return sorted(found, key=lambda x: x[1])[min(choice.pieces, len(found) - 1)]

    def stored_operands(self, nest: Nest, choice: Choice) -> Iterator[tuple[Kernels, float]]:
        """Kernels of a GEMM whose factors or results lie in memory in another form, which kernels of their own make."""
        halves = self.in_halves(nest)
        ways = [([], nest), *([([halves[0]], halves[1])] if halves else [])]
        found = [[*first, rest] for first, rest in ways[1:]]
        for first, rest in ways if self.target.is_gpu else []:
            if (main := main_contraction(rest)) is not None:
                found += [[*first, *nests] for nests in reordered(rest, *main, self.target.has_tma)]
            elif any(is_window(nest, a) for t in nest.stages for a in t.over):
                found += [beside_last(nest)]
        for nests in filter(None, found):
            try:
                plans = [plan_of(n, self.target, choice) for n in nests]
            except Unfit:
                continue
            yield [(tuple(base_of(t) for t, _ in n.outputs), p) for n, p in zip(nests, plans)], sum(map(self.cost, plans))

    def in_halves(self, nest: Nest) -> tuple[Nest, Nest] | None:
        """The smaller factor of a float32 GEMM in halves that are stored; None where that is not possible."""
        main = main_contraction(nest)
        if main is None or nest.limits or exactness(main[1].a.dtype, self.target) != "halves":
            return None
        t, c = main
        f, other = sorted((c.a, c.b), key=lambda f: self.count(f.axes))
        deep = max((a for a in t.over if is_plain(t, a)), key=lambda a: self.number(a.extent), default=None)
        computed = any(r.value in nest.stages for r in f.reads) or any(x.op in HEAVY for x in walk(other))
        return None if deep is None or f.dtype != "float32" or computed else in_halves(nest, t, f, other, deep)

    def count(self, axes: Iterable[Axis]) -> float:
        return float(prod(self.number(a.extent) for a in axes))

    def number(self, s: Size) -> int:
        return max(1, size_at(s, {n: self.sizes.get(n, GUESS) for n in s.names})) if isinstance(s, Dim) else s

    def blocks(self, plan: Plan, without: Set[Axis]) -> float:
        """Blocks along the axes that a value does not have: how often it is computed or read."""
        out = 1.0
        for a in plan.nest.axes:
            use = plan.uses[a]
            if a not in without and use.kind in ("grid", "tile"):
                out *= -(-self.number(a.extent) // use.size)
        return out

    def cost(self, plan: Plan) -> float:
        """Estimated seconds of a kernel: its loops in turn.  What several statements compute counts once: it lies in a tile."""
        nest, stages = plan.nest, set(plan.nest.stages)
        blocks, cycles = self.blocks(plan, frozenset()) / self.processors, self.chip.sms * self.chip.clock
        gemms = {t for t in nest.stages if plan.gemm_of(t) is not None}
        seen: set[Tensor] = set()
        busy, between, computing = 0.0, 0.0, False
        for p in [*passes(nest, plan.loops()), None]:
            looped = frozenset(p.axes) if p is not None else frozenset()
            found = [t for t in (self.below(p.stages, stages) if p is not None else nest.stages)
                     if t not in seen and (p is None or looped & frozenset((*t.axes, *t.over)))]
            seen |= set(found)
            bodies = [t.body for t in found if t.body is not None] + ([e for _, e in nest.outputs] if p is None else [])
            multiplied, beside, others = self.work(plan, found, bodies, gemms)
            computing |= beside > 0
            both = 2 * (multiplied + beside) / (self.chip.flops * cycles), others / (OTHER[self.target.is_gpu] * cycles)
            busy += max(both) + NOT_HIDDEN * min(both)
            if gemms and p is not None and not multiplied:  # blocks of GEMMs are few: their other loops wait for memory
                reads = {r for e in bodies for r in self.reads_through(e, stages) if r.axes & looped}
                between += sum(self.count(r.axes) * self.blocks(plan, r.axes) * bits_of(r.dtype) / 8 for r in reads)
        resident = 1 if not self.target.is_gpu else COMPUTING if computing else 1 if gemms else RESIDENT
        loading = min(1.0, blocks / resident)
        moved = max(busy / min(1.0, blocks), self.traffic(plan) / (self.chip.memory * loading))
        return moved + between / (self.chip.memory * loading) + self.chip.start

    def below(self, found: Iterable[Tensor], stages: Set[Tensor]) -> dict[Tensor, None]:
        """Stages, and those that they are made of."""
        return reached(found, lambda t: [r.value for r in t.body.reads if r.value in stages] if t.body is not None else [])

    def work(self, plan: Plan, found: list[Tensor], bodies: list[Scalar], gemms: Set[Tensor]) -> tuple[float, float, float]:
        """Of some stages and expressions: (multiply-adds of GEMMs by the time of one, what threads compute beside them in
        their loop, by the same; operations of threads)."""
        stages = set(plan.nest.stages)
        products = {t.body for t in found if t in gemms}
        distinct = {x for e in bodies for x in walk(e) if x.op not in FREE and is_float(x.dtype)} - products
        columns = [(frozenset(c.n), frozenset((*c.m, *t.over))) for t in found if t in gemms
                   for c in [plan.gemm_of(t)] if c is not None and plan.loops() & frozenset(c.n)]

        def times(axes: Set[Axis]) -> float:  # by as many threads as compute it
            each = BY_COLUMN if any(axes & n and not axes & m for n, m in columns) else 1
            return self.count(axes) * self.blocks(plan, axes) * each

        inverses = {x.args[1] for x in distinct if x.op == "div" and x.args[1].axes < x.axes and x.args[1].reads}
        others: float = sum([(HEAVIER if x.op in HEAVY else 1.0) * times(x.axes) for x in distinct])
        others += INVERSE * sum([times(d.axes) for d in inverses])
        total, beside = 0.0, 0.0
        for t in found:
            axes = frozenset((*t.axes, *t.over))
            counted = self.count(axes) * self.blocks(plan, axes)
            c = plan.gemm_of(t)
            if c is None:
                others += counted
                reads = self.reads_through(t.body, stages)
                sums = [linear(i)[0] for r in reads for i in r.args if len(i.axes) > 1]
                walked = [a for a in t.over if plan.uses[a].kind == "serial"]
                if any(axis(a) in f and a.extent not in f.values() for a in walked for f in sums):  # windows that overlap
                    others += sum([times(r.axes) * self.loads(r, plan.nest.axes[-1:]) for r in reads])
                if plan.loops() & axes and t.kind in REDUCTIONS and gemms.isdisjoint(self.below([t], stages)):
                    beside += counted * COMPUTED[self.target.is_gpu]
                continue
            stored = are_halves(c.a) or are_halves(c.b)
            total += counted * EXACT["stored" if stored else exactness(c.a.dtype, self.target)]
            for f in (c.a, c.b):
                plain = f.args[0] if f.op == "cast" and is_float(f.args[0].dtype) else f
                made = self.below([r.value for r in f.reads if r.value in stages], stages)
                indices = [i for r in f.reads for i in r.args] if self.target.is_gpu else []
                placed = any(x.op == "floordiv" and not is_power(number(x.args[1])) for i in indices for x in walk(i))
                computed = placed or plain.op != "read" and not stored
                if computed and plan.loops() & f.axes and gemms.isdisjoint(made):
                    each = COMPUTED[self.target.is_gpu] * (PLACED if placed else 1)
                    beside += self.count(f.axes) * self.blocks(plan, f.axes) * each
        return total, beside if total else 0.0, others

    def loads(self, r: Scalar, last: tuple[Axis, ...]) -> float:
        """Operations by whose time an element is loaded: with its neighbours along the last axis, beside them, or alone."""
        if not self.target.is_gpu or not r.args or r.axes.isdisjoint(last):
            return 1.0
        return WIDE if r.args[-1].op == "axis" and r.args[-1].axes >= set(last) else (
            ALONE if r.args[-1].axes.isdisjoint(last) else BESIDE)

    def traffic(self, plan: Plan) -> float:
        """Bytes moved, those that caches serve at a fraction."""
        nest, kept, total = plan.nest, set(plan.nest.stages), 0.0
        seen: dict[Scalar, int] = dict.fromkeys(nest.global_reads(), 0)
        known: set[tuple[Tensor, tuple[frozenset[Axis], ...]]] = set()
        for p in passes(nest, plan.loops()):
            for r in {r for t in p.stages for r in self.reads_through(t.body, kept) if r.axes & frozenset(p.axes)}:
                seen[r] += 1
        for r, passed in sorted(seen.items(), key=lambda x: (-self.count(x[0].axes), repr(x[0]))):
            size = self.count(base_of(r.value).axes) * bits_of(r.value.dtype) / 8
            touched = min(self.count(r.axes) * bits_of(r.value.dtype) / 8, size) if r.args else 1.0
            again = self.blocks(plan, r.axes) * self.count(r.axes) * bits_of(r.value.dtype) / 8 - touched
            last = next((i for i, n in zip(reversed(r.args), reversed(r.value.shape)) if n != 1), const(0))
            touched *= self.wasted(plan, last.axes, r.value) if r.args and r.axes & set(nest.axes) else 1
            cached = REREAD * (0.1 if self.target.is_gpu else 0.5)
            near = r.value, tuple(frozenset(i.axes) for i in r.args)  # elements beside those of another read
            total += (cached if near in known else max(1, passed)) * touched + cached * max(0.0, again)
            known.add(near)
        for t, _ in nest.outputs:
            own = [a for a in output_axes(nest, t) if a in nest.axes]
            beside = next((k for k in reversed(range(len(own))) if plan.uses[own[k]].size != own[k].extent), 0)
            total += self.count(t.axes) * bits_of(t.dtype) / 8 * (self.wasted(plan, own[beside:], t) if own else 1)
        return total

    def wasted(self, plan: Plan, last: Iterable[Axis], t: Tensor) -> float:
        """Bytes of memory moved for each that is wanted, by tiles of a tensor with such axes in its last index."""
        sector, line = SECTOR[self.target.is_gpu], prod(plan.uses[a].size for a in last) * bits_of(t.dtype) // 8
        return sector / min(sector, max(1, line))

    def reads_through(self, e: Scalar | None, kept: set[Tensor]) -> set[Scalar]:
        """Reads of memory in an expression and in the stages that it reads."""
        found = reached(e.reads if e is not None else (),
                        lambda r: r.value.body.reads if r.value in kept and r.value.body is not None else ())
        return {r for r in found if r.value not in kept}


def is_power(n: Size | None) -> bool:
    """Whether a number is a power of two."""
    return isinstance(n, int) and n > 0 and n & (n - 1) == 0


def is_copy_of_item(t: Tensor, e: Scalar) -> bool:
    """Whether an output is a result of a loop as it is."""
    return e.op == "read" and e.value.kind == "item" and e.dtype == t.dtype and e.args == tuple(map(axis, t.axes))


def bodies_of(t: Tensor) -> list[Scalar]:
    """The expressions that a tensor is computed by."""
    if "block" in t.attrs:
        return [read(x) for x in t.attrs["block"].operands]
    if t.kind == "item":
        return list(t.attrs["steps"].bodies())
    return [] if t.body is None else [t.body]
