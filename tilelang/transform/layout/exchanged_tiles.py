"""Keeps tiles in registers over parallel loops whose iterations exchange elements, like the steps of a fast transform.

    for i in T.Parallel(4096): b[i] = a[i] + a[i ^ 1]         # A, B: a thread holds i, i ^ 1, i ^ 2 and i ^ 3
    for i in T.Parallel(4096): a[i] = b[i] - b[i ^ 2]    ->   for i in T.Parallel(4096): B[i] = A[i] + A[i ^ 1]
    for i in T.Parallel(4096): b[i] = a[i] + a[i ^ 4]         for i in T.Parallel(4096): A[i] = B[i] - B[i ^ 2]
                                                              exchange[i] = A[i];  A_1[i] = exchange[i]
                                                              for i in T.Parallel(4096): B_1[i] = A_1[i] + A_1[i ^ 4]

The elements that one iteration touches differ in some bits of their indices.  Consecutive loops form a group as long as these
are few bits together: its fragments have them in registers, so inside a group threads need nothing of each other.  Between
groups a tile goes through shared memory, with a pad against bank conflicts.  A tile that other statements touch is loaded
before the first group and stored after the last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, For, If, Launch, Load, Parallel, Region, Seq, Stmt, Store,
                         Var, While, const, contains, fresh, load, replace, rewrite_stmts, seq, stmts_of, substitute, walk,
                         with_inner, with_options, DYNAMIC, EMPTY, FRAGMENT, GLOBAL, SHARED)
from tilelang.ir.plans import ParallelPlan
from tilelang.ir.record import state
from tilelang.layout import REGISTER, THREAD, Fragment, Layout, Mode
from tilelang.layout.layout import row_major
from tilelang.ops import Copy
from tilelang.ops.distribute import index_values
from tilelang.target import is_pure

from ..analysis.distributed_loop import in_order
from ..analysis.statements import inline_index_binds, renamed
from ..framework.pass_ import TILE, PassContext, pass_
from .shared_layouts import copy_loops

FEWEST, MOST = 3, 6  # bits of an index that are in registers
LONGEST = 32  # iterations of a serial loop that may be written one after another
LINE = 128  # bytes of a row of banks


@pass_(needs=TILE, of=Launch)
def exchanged_tiles(launch: Launch, cx: PassContext) -> Stmt | None:
    """Keep tiles in registers over groups of parallel loops that exchange elements.  The module docstring shows it."""
    if launch.plan.by_hand or not any(map(_may_exchange, walk(launch.body, Parallel))):
        return None
    found = _Exchanges(launch)
    body = found.below(launch.body)
    if not found.layouts:
        return launch
    left = Counter(walk(body, Buffer))
    body = rewrite_stmts(body, lambda s: EMPTY if isinstance(s, Alloc) and left[s.buffer] == 1 else None)
    return with_options(replace(launch, body=body), layouts=(*launch.plan.layouts, *found.layouts))


def _may_exchange(s: Parallel) -> bool:
    """Whether a loop accesses different elements of tiles of one shape."""
    at: dict[Any, set[Any]] = {}
    for x in walk(s.body, Load, Store):
        if x.buffer.scope_name in (*SHARED, FRAGMENT):
            at.setdefault(x.buffer.shape, set()).add(x.indices)
    return any(len(found) > 1 for found in at.values())


def _bits(shape: tuple[int, ...]) -> list[int]:
    """The bits in the indices of each dimension.  An odd factor of the extent is none: all its values are in one thread."""
    return [(n & -n).bit_length() - 1 for n in shape]


def _code(shape: tuple[int, ...], at: list[np.ndarray]) -> Any:
    """The bits of all dimensions of an element, those of the last one lowest."""
    out = np.asarray(0)
    for v, k in zip(at, _bits(shape)):
        out = (out << k) + v % (1 << k)
    return out


@state
class Step:
    """A loop or copy of a group.

    source: the statement of the program that it comes from, with allocs.  tiles: which elements of each are read, and which are
    surely written, as flags.  stored: those that may be.  codes: of each access the code of its element at each point of
    the loop.  mask: bits in which elements of one iteration differ.
    """

    stmt: Stmt
    source: Stmt
    tiles: dict[Buffer, tuple[np.ndarray, np.ndarray]]
    stored: set[Buffer]
    codes: list[np.ndarray]
    allocs: tuple[Stmt, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.tiles)).shape

    @property
    def mask(self) -> int:
        return int(np.bitwise_or.reduce([np.bitwise_or.reduce(c ^ self.codes[0], axis=None) for c in self.codes]))


class _Exchanges:
    """Rewrites the statements of one launch.  layouts: those of the fragments that it makes."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.threads = 1 << (launch.num_threads.bit_length() - 1)
        self.layouts: list[tuple[Buffer, Any]] = []
        self.uses = _uses(launch.body)
        views: dict[Var, set[Buffer]] = {}
        for b in walk(launch.body, Buffer):
            views.setdefault(b.data, set()).add(b)
        kept = {x.buffer.data for x in walk(launch.body, AddressOf)} | {b.data for b, _ in launch.plan.layouts} | {
            a.data for x in walk(launch.body, Call) for a in x.args if isinstance(a, Buffer)}
        self.tiles = {x.buffer for x in walk(launch.body, Alloc)
                      if x.buffer.scope_name in (*SHARED, FRAGMENT) and x.buffer.is_static and x.buffer.dtype.lanes == 1
                      and x.buffer.dtype.bits % 8 == 0 and x.buffer.data not in kept and len(views[x.buffer.data]) == 1}

    def below(self, s: Stmt) -> Stmt:
        """A statement in which groups are rewritten, but for branches, which single warps may run, and pipelined loops."""
        if isinstance(s, (If, While, Parallel)) or isinstance(s, For) and (s.plan.num_stages or s.plan.counted):
            return s
        if isinstance(s, Seq):
            return seq(*self._sequence([self.below(x) for x in s.stmts]), span=s.span)
        return with_inner(s, self.below)

    def _sequence(self, stmts: list[Stmt]) -> Iterator[Stmt]:
        run: list[Step] = []
        for s in stmts:
            steps = self._iterations(s) if isinstance(s, For) else self._single(s)
            if isinstance(s, Alloc):
                yield s
                continue
            if run and (not steps or steps[0].shape != run[0].shape):
                yield from self._run(run)
                run = []
            run += steps
            if not steps:
                yield s
        yield from self._run(run)

    # ---- the steps of a run ---------------------------------------------------------------------------------------

    def _single(self, s: Stmt) -> list[Step]:
        """A copy from or to global memory, or a loop, over tiles of one shape, as a step; nothing for other statements."""
        order: list[tuple[Any, bool]] = []
        if isinstance(s, Copy) and not s.plan.given():
            vars, extents, ((src, i), (dst, k)) = copy_loops(s)
            order = [(load(src, i), False), (Store(dst, k, const(0, dst.dtype)), False)] if GLOBAL in (
                src.scope_name, dst.scope_name) else []
        elif isinstance(s, Parallel) and not s.plan.given() and not any(
                isinstance(x, (For, While, Parallel, AddressOf, Region, Alloc)) or isinstance(x, Call) and not is_pure(x.op)
                for x in walk(s.body)):
            vars, extents = s.vars, tuple(int(n.value) for n in s.extents if isinstance(n, Const))
            order = list(in_order(inline_index_binds(s.body, s.vars)))
        if not order or not all(isinstance(n, int) for n in extents) or len(extents) != len(vars):
            return []
        env = dict(zip(vars, np.indices(extents, sparse=True)))
        out = Step(s, s, {}, set(), [])
        for x, conditional in order:
            b = x.buffer
            if b not in self.tiles and b.scope_name != FRAGMENT:
                continue
            at = [v for i in x.indices if (v := index_values(i, env)) is not None]
            if b not in self.tiles or out.tiles and b.shape != out.shape or len(at) < len(b.shape) or any(
                    v.min() < 0 or v.max() >= n for v, n in zip(at, b.shape)):
                return []
            out.codes.append(np.broadcast_to(_code(b.shape, at), extents))
            reads, writes = out.tiles.setdefault(b, (np.zeros(b.shape, bool), np.zeros(b.shape, bool)))
            if isinstance(x, Load):
                reads[tuple(at)] = True
            else:
                out.stored.add(b)
                writes[tuple(at)] |= not conditional
        return [out] if out.tiles else []

    def _iterations(self, s: For) -> list[Step]:
        """The steps of a loop whose iterations exchange different elements; nothing for other loops."""
        if s.plan.num_stages or s.plan.counted or not isinstance(s.start, Const) or not isinstance(s.extent, Const) or \
                s.extent.value > LONGEST or not any(map(_may_exchange, walk(s.body, Parallel))):
            return []
        allocs = tuple(x for x in stmts_of(s.body) if isinstance(x, Alloc))
        body = seq(*[x for x in stmts_of(s.body) if not isinstance(x, Alloc)])
        out: list[Step] = []
        for k in range(int(s.extent.value)):
            names: dict[Any, Any] = {s.var: const(int(s.start.value) + k, s.var.dtype)}
            for x in stmts_of(renamed(body)):
                x = substitute(x, names)
                if isinstance(x, Bind) and x.value.dtype.is_int and not contains(x.value, Load, Call):
                    names[x.var] = x.value
                    continue
                steps = self._single(x)
                if not steps or out and steps[0].shape != out[0].shape:
                    return []
                steps[0].source, steps[0].allocs = s, allocs
                out += steps
        return out if any(x.mask for x in out) else []

    # ---- groups ---------------------------------------------------------------------------------------------------

    def _run(self, run: list[Step]) -> Iterator[Stmt]:
        """The statements of a run of steps, in groups where that pays."""
        groups = self._groups(run) if any(x.mask for x in run) and not self._completed(run) else []
        if not groups or 2 * len(groups) > len(run):
            yield from {id(x.source): x.source for x in run}.values()
            return
        yield from _Run(self, run, groups).stmts()

    def _completed(self, run: list[Step]) -> bool:
        """Whether a run writes some elements of a tile that is used elsewhere: the others may never have been written."""
        here = sum((_uses(s) for s in {id(x.source): x.source for x in run}.values()), Counter[Buffer]())
        tiles = {b for x in run for b in x.tiles}
        return any(self.uses[b] > here[b] and _keeps(b, run) and not _reads_first(b, run) for b in tiles)

    def _groups(self, run: list[Step]) -> list[tuple[list[Step], Fragment, list[Fragment]]]:
        """(steps, layout of their tiles, layout of each loop) of groups; empty where some step fits in none."""
        shape, size = run[0].shape, next(iter(run[0].tiles)).dtype.bytes
        total = sum(_bits(shape))
        wanted = max(FEWEST, total - (self.threads.bit_length() - 1))
        if total < wanted + 5 or math.prod(shape) >> total << wanted > 1 << MOST:
            return []
        parts: list[tuple[int, list[Step]]] = []
        left = reduce(or_, [x.mask for x in run])
        most, count = 0, -(-left.bit_count() // wanted)
        for step in run:
            if parts and (parts[-1][0] | step.mask).bit_count() <= most:
                parts[-1] = parts[-1][0] | step.mask, [*parts[-1][1], step]
            else:
                left &= ~(parts[-1][0] if parts else 0)
                most = max(-(-left.bit_count() // max(1, count - len(parts))), step.mask.bit_count())
                parts.append((step.mask, [step]))
                while len(parts) > 1 and len(parts[-2][1]) > 1 and _moves(parts[-2][1][-1]):
                    parts[-1][1].insert(0, parts[-2][1].pop())  # nearer to where its result is used
        out = []
        for mask, steps in parts:
            near = any(b.scope_name == GLOBAL for x in steps for b in walk(x.stmt, Buffer))
            free = [b for b in (*range(3 * near), *reversed(range(3 * near, total))) if not mask >> b & 1]  # low bits: vectors
            registers = sorted([b for b in range(total) if mask >> b & 1] + free[:max(0, wanted - mask.bit_count())])
            if len(registers) > wanted:
                return []
            threads = _spread([b for b in range(total) if b not in registers], size)
            layout = _layout(shape, registers, threads, self.launch.num_threads)
            loops = [_loop_layout(x, threads, self.launch.num_threads) for x in steps]
            if any(x is None for x in loops):
                return []
            out.append((steps, layout, loops))
        return out  # type: ignore[return-value]


def _spread(bits: list[int], size: int) -> list[int]:
    """The bits of an element that select the thread, the lanes of a warp first: those that select different banks of the
    exchange, in which an element of `size` bytes stands one word further for each line before it."""
    def bank(b: int) -> int:
        return (size << b) % LINE or (4 << b) * size // LINE % LINE

    lanes: list[int] = []
    for b in bits:
        if len(lanes) < 5 and bank(b) and bank(b) not in map(bank, lanes):
            lanes.append(b)
    rest = [b for b in bits if b not in lanes]
    lanes += rest[:5 - len(lanes)]
    return lanes + [b for b in rest if b not in lanes]


def _layout(shape: tuple[int, ...], registers: list[int], threads: list[int], count: int) -> Fragment:
    """The layout of a tile with these bits of the code in registers and threads, the lowest ones first."""
    modes: list[tuple[Mode, ...]] = []
    step, end = 1 << len(registers), len(registers) + len(threads)
    for n, k in zip(shape, _bits(shape)):
        modes.append((Mode(n >> k, REGISTER, step), *(
            Mode(2, REGISTER, 1 << registers.index(b)) if b in registers else Mode(2, THREAD, 1 << threads.index(b))
            for b in reversed(range(end - k, end)))))
        step, end = step * (n >> k), end - k
    return Fragment(shape, modes, threads=count)


def _loop_layout(step: Step, threads: list[int], count: int) -> Fragment | None:
    """The layout of a loop whose iterations run in the threads that hold what they touch; None where it has no such digits."""
    place, bits = {1 << b: 1 << k for k, b in enumerate(threads)}, sum(1 << b for b in threads)
    for code in step.codes:
        modes: list[tuple[Mode, ...]] = []
        register, left = 1, dict(place)
        for d in reversed(range(code.ndim)):
            own: list[Mode] = []
            weight = 1
            while weight < code.shape[d]:
                rest = code.shape[d] // weight
                at = code[tuple(weight if k == d else 0 for k in range(code.ndim))]
                to = left.pop(int(at) & bits, None)
                own.append(Mode(rest if rest % 2 else 2, REGISTER if to is None else THREAD, to or register))
                register *= own[-1].size if to is None else 1
                weight *= own[-1].size
            modes.insert(0, tuple(reversed(own)))
        out = Fragment(code.shape, modes, threads=count)
        if np.array_equal(out.owners()[0], sum((code >> b & 1) << k for k, b in enumerate(threads))):
            return out
    return None


class _Run:
    """Emits the groups of a run.  held: the fragment that holds each tile, with its layout."""

    def __init__(self, whole: _Exchanges, run: list[Step], groups: list[tuple[list[Step], Fragment, list[Fragment]]]) -> None:
        self.whole, self.run, self.groups = whole, run, groups
        here = sum((_uses(s) for s in {id(x.source): x.source for x in run}.values()), Counter[Buffer]())
        tiles = {b: _reads_first(b, run) for x in run for b in x.tiles}
        self.loaded = {b for b, reads in tiles.items() if reads}
        self.stored = [b for b in tiles if (b in self.loaded or whole.uses[b] > here[b]) and any(b in x.stored for x in run)]
        self.held: dict[Buffer, tuple[Buffer, Fragment]] = {}
        self.exchanges: dict[Any, Buffer] = {}

    def stmts(self) -> Iterator[Stmt]:
        out: list[Stmt] = []
        for steps, layout, loops in self.groups:
            own: dict[Buffer, Buffer] = {}
            for step, loop in zip(steps, loops):
                for b in step.tiles:
                    if b not in own:
                        own[b] = Buffer(b.name, b.shape, b.dtype, FRAGMENT, span=b.span)
                        self.whole.layouts.append((own[b], layout))
                        out.append(Alloc(own[b]))
                        if b in self.loaded if b not in self.held else _keeps(b, steps):
                            out += self._moved(b, own[b], layout)
                    self.held[b] = own[b], layout
                s = substitute(step.stmt, own)
                out.append(with_options(s, loop_layout=loop) if isinstance(s, Parallel) else s)
        for b in self.stored:
            out.append(_each(b, lambda v, b=b: Store(b, v, load(self.held[b][0], v)), self.held[b][1]))
        yield from {id(x): x for step in self.run for x in step.allocs}.values()
        yield from (Alloc(b) for b in self.exchanges.values())
        yield from out

    def _moved(self, b: Buffer, to: Buffer, layout: Fragment) -> Iterator[Stmt]:
        """A tile from where it is to a fragment."""
        if b not in self.held:
            yield _each(b, lambda v: Store(to, v, load(b, v)), layout)
            return
        old, was = self.held[b]
        through = self.exchanges.get(b.dtype)
        if through is None:
            through = self.exchanges[b.dtype] = Buffer("exchange", b.shape, b.dtype, DYNAMIC)
            self.whole.layouts.append((through, _padded(b)))
        yield _each(b, lambda v: Store(through, v, load(old, v)), was)
        yield _each(b, lambda v: Store(to, v, load(through, v)), layout)


def _padded(b: Buffer) -> Layout:
    """Row-major with a word between the lines of banks."""
    line, pad = LINE // b.dtype.bytes, max(1, 4 // b.dtype.bytes)

    def place(*at: Any) -> Any:
        flat = row_major(at, b.shape)
        return flat + flat // line * pad

    return Layout(b.shape, place)


def _uses(s: Stmt) -> Counter[Buffer]:
    return Counter(x.buffer for x in walk(s, Load, Store, Region))


def _moves(step: Step) -> bool:
    """Whether a step only moves elements between tiles, each from its place to the same place."""
    return not step.mask and not any(b.scope_name == GLOBAL for b in walk(step.stmt, Buffer))


def _reads_first(b: Buffer, steps: list[Step]) -> bool:
    """Whether steps read elements of a tile that no step before has surely written."""
    known = np.zeros(b.shape, bool)
    for reads, writes in (x.tiles[b] for x in steps if b in x.tiles):
        if np.any(reads & ~known):
            return True
        known |= writes
    return False


def _keeps(b: Buffer, steps: list[Step]) -> bool:
    """Whether elements of a tile keep their values during steps, or these read them."""
    return _reads_first(b, steps) or not np.logical_or.reduce([x.tiles[b][1] for x in steps if b in x.tiles]).all()


def _each(b: Buffer, body: Any, layout: Fragment) -> Stmt:
    v = tuple(fresh("i") for _ in b.shape)
    return Parallel(v, tuple(const(n) for n in b.shape), body(v), plan=ParallelPlan(loop_layout=layout))
