"""T.reduce_with, T.scan_with, T.reduce_argmax and T.reduce_argmin: reductions and scans by a function of two states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

from tilelang import errors
from tilelang.ir import (Alloc, Attrs, Binary, Bind, Buffer, Expr, For, Load, Region, Select, Span, Stmt, Store,
                         TileOp, Var, const, convert, fresh, load, node, rewrite, seq, tile_op, walk, FRAGMENT, LOCAL, PRIVATE,
                         TRUE)
from tilelang.layout import REGISTER, THREAD, Fragment, Mode

from .base import Access, LowerContext
from .distribute import Distribution
from .layouts import carried, same_layout
from .lower_reduce import ReduceLowering, from_lane, memory_of_block, split_at_warp, warp_of
from .lower_scan import ScanSteps
from .pairing import TileLoops
from .reduce import memory
from .states import ELEMENT, LEFT, POSITION, RIGHT, Values, bound, given

errors.register("combine-scope", ValueError, "a reduction or scan by a function, of tiles in memory that it does not work on",
                "copy the data to a fragment or shared buffer first", expected="tiles in shared memory or fragments")
errors.register("combine-shape", ValueError, "tiles of a reduction or scan by a function whose shapes do not fit",
                "give all sources one shape; results of a scan have it too, those of a reduction lack dimension dim",
                expected="sources of one shape, results of the shape that follows")
errors.register("combine-element", ValueError, "a function of two states that reads an element of a fragment",
                "copy the tile to shared memory, or make it another source", expected="no element of a fragment")


@node
class Combine(TileOp):
    """The states of the elements of srcs along dim, combined in their order: all of them, or in a scan each prefix.

    srcs: whole tiles of one shape.  outs: whole tiles: that shape, without dim (or 1 there) unless scan.
    first: the state of the elements at one place.  joined: the state of a left and a right one, associative.  identity: the
    state that joined with another gives that one.  results: the values of outs that a (left) state gives.  All four hold
    operands (states.py) and may hold values that are the same for all elements.
    reverse: a scan from the end, whose left state is that of the elements after.
    commutative: left and right may be exchanged, so that elements need not be combined in their order.
    """

    srcs: tuple[Region, ...]
    outs: tuple[Region, ...]
    first: tuple[Expr, ...]
    joined: tuple[Expr, ...]
    identity: tuple[Expr, ...]
    results: tuple[Expr, ...]
    dim: int
    reverse: bool = False
    commutative: bool = False
    attrs: Attrs = ()
    span: Span | None = None
    scan: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sources."""
        return tuple(int(n) for n in self.srcs[0].extents)

    @property
    def lines(self) -> tuple[int, ...]:
        """The shape of the sources with 1 along dim: the lines that are combined."""
        return tuple(1 if d == self.dim else n for d, n in enumerate(self.shape))

    # ---- one line after another: the meaning ------------------------------------------------------------------------

    def expanded(self) -> Stmt:
        """The operation as loops: in T.Parallel over the lines, or by each thread for private arrays, element after element.

        The reference interpreter and the CPU execute these.
        """
        def line(at: tuple[Var, ...]) -> Stmt:
            states = [Buffer(f"state{k}", (1,), e.dtype, LOCAL, span=self.span) for k, e in enumerate(self.identity)]
            return seq(*[Alloc(s, None, span=self.span) for s in states], self.one_line(states, at), span=self.span)

        loops = TileLoops()
        return (loops.private if self.srcs[0].buffer.scope_name in PRIVATE else loops.parallel)(self.lines, line, self.span)

    def one_line(self, states: Sequence[Buffer], at: tuple[Var, ...]) -> Stmt:
        """Combine one line of the sources in `states`, arrays of one element, and store the results."""
        k, n, zero = fresh("k"), self.shape[self.dim], (const(0),)
        place = const(n - 1) - k if self.reverse else k
        where, own = (*at[:self.dim], place, *at[self.dim + 1:]), [load(s, zero) for s in states]
        new, values = bound(self.states_at(where))
        step = seq(new, self.joined_into(states, zero, values), self.stored(own, where) if self.scan else None)
        return seq(*[Store(s, zero, e) for s, e in zip(states, self.identity)],
                   For(k, const(0), const(n), "serial", step, span=self.span), None if self.scan else self.stored(own, at))

    def states_at(self, where: tuple[Any, ...]) -> tuple[Expr, ...]:
        """The state of the elements at a place."""
        elements = [load(s.buffer, where, span=self.span) for s in self.srcs]
        return given(self.first, {ELEMENT: elements, POSITION: [where[self.dim]]})  # type: ignore[no-any-return]

    def joined_into(self, states: Sequence[Buffer], at: tuple[Any, ...], values: Values, joined: Any = None) -> Stmt:
        """states[at] = what they and `values`, after them, give.  joined: the function, where its accesses are lowered."""
        new, out = bound(given(joined or self.joined, {LEFT: [load(s, at) for s in states], RIGHT: values}))
        return seq(new, *[Store(s, at, v, span=self.span) for s, v in zip(states, out)])

    def stored(self, state: Values, where: tuple[Any, ...], which: Sequence[int] | None = None) -> Stmt:
        """Results of a state (default: all), stored at a place of the sources' shape, 0 along dim for reductions."""
        out = []
        for k in range(len(self.outs)) if which is None else which:
            b = self.outs[k].buffer
            at = where if len(b.shape) == len(where) else (*where[:self.dim], *where[self.dim + 1:])
            out.append(Store(b, tuple(map(convert, at)), given(self.results[k], {LEFT: state}), span=self.span))
        return seq(*out)

    # ---- layouts and lowering ---------------------------------------------------------------------------------------

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Sources have one layout, results of a scan too; threads that hold a row's elements hold its reduction."""
        groups = ((*self.srcs, *self.outs),) if self.scan else (self.srcs, self.outs)
        for a, b in (pair for group in groups for pair in product(group, group)):
            if got := same_layout(a, b, known):
                return got
        lay = known.get(self.srcs[0].buffer)
        if self.scan or lay is None or self.srcs[0].buffer.scope_name != FRAGMENT:
            return {}
        free = [r.buffer for r in self.outs if r.buffer.scope_name == FRAGMENT and known.get(r.buffer) is None]
        found = {b: carried(lay.reduce(self.dim), b.shape) for b in free}
        return {b: new for b, new in found.items() if new is not None}

    def lower(self, cx: LowerContext) -> Stmt:
        """Reductions as T.reduce_max's, scans as T.cumsum's."""
        if self.srcs[0].buffer.scope_name in PRIVATE:
            states = [cx.new_local("acc", 1, e.dtype) for e in self.identity]
            return cx.private(self.lines, lambda at: self.one_line(states, at), span=self.span)
        return self._scan(cx) if self.scan else CombineLowering(self, cx).lower()

    def _scan(self, cx: LowerContext) -> Stmt:
        joined = tuple(map(cx.expr, self.joined))

        def join(a: Values, b: Values) -> tuple[Stmt, Values]:
            new, both = bound([*a, *b])
            more, out = bound(given(joined, {LEFT: both[:len(a)], RIGHT: both[len(a):]}))
            return seq(new, more), out

        tile = next((r.buffer for r in (*self.outs, *self.srcs) if r.buffer.scope_name == FRAGMENT), None)
        return ScanSteps(self.shape, self.dim, self.reverse, self.states_at, lambda at, state: self.stored(state, at), join,
                         list(self.identity), self.span).lower(cx, None if tile is None else cx.layout_of(tile))

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Tiles of fitting shapes in shared memory and fragments, or all of them private; no element of a fragment inside."""
        first = memory(self.srcs[0].buffer.scope_name)
        for b in (r.buffer for r in (*self.srcs, *self.outs)):
            if first != "other" and memory(b.scope_name) == first:
                continue
            raise errors.error("combine-scope", f"T.{self.op_name} works on tiles on the chip, all of the block or all "
                               f"of a thread, `{b.name}` is {b.scope_name}", found=f"`{b.name}` in {b.scope_name} memory",
                               span=self.span)
        outs = [r.buffer.data for r in self.outs]
        if len(set(outs)) < len(outs):
            raise errors.error("combine-shape", "two results are one buffer", expected="a buffer for each result",
                               found="one for two", span=self.span, hint="give each result a tile of its own")
        shape = tuple(self.srcs[0].extents)
        fits = [shape] if self.scan else [self.lines, tuple(n for d, n in enumerate(shape) if d != self.dim) or (1,)]
        for r, allowed in (*((r, [shape]) for r in self.srcs), *((r, fits) for r in self.outs)):
            if tuple(r.extents) not in allowed:
                raise errors.error("combine-shape", f"`{r.buffer.name}` has the shape ‹{tuple(r.extents)}›, not "
                                   f"{' or '.join(map(str, allowed))}", expected=" or ".join(map(str, allowed)), span=self.span)
        for x in (x for e in (*self.first, *self.joined, *self.identity, *self.results) for x in walk(e, Load)):
            if x.buffer.scope_name == FRAGMENT:
                raise errors.error("combine-element", f"the function reads an element of the fragment `{x.buffer.name}`, which "
                                   "one thread holds", found=f"`{x.buffer.name}[…]`", span=self.span)

    def accesses(self) -> tuple[Access, ...]:
        into = {r.buffer for r in self.outs} if self.scan else set()
        own = {r.buffer for r in self.srcs if r.buffer in into}  # of an element in the step that writes it
        return (*(Access(r, "read") for r in self.srcs if r.buffer not in own),
                *(Access(r, "readwrite" if r.buffer in own else "write") for r in self.outs))


@tile_op("reduce_with")
class ReduceWith(Combine):
    """All elements of srcs along dim combined."""


@tile_op("scan_with")
class ScanWith(Combine):
    """Each prefix of srcs along dim combined."""

    scan: ClassVar[bool] = True


def expanded(program: Any) -> Any:
    """The program with the loops of each Combine in its place."""
    return rewrite(program, Combine.expanded, Combine)


# ---- lowering --------------------------------------------------------------------------------------------------------

class CombineLowering(ReduceLowering):
    """Lowers one reduction by a function (op: a Combine) to the statements of a thread.

    The elements of a row are combined in their order: registers first, where a thread's elements are neighbours, then lanes,
    then warps.  Where the layout of the source has another order and the function needs theirs, sources are copied to shared
    memory first.  Of two lanes the lower one's state is the left one in both, so that copies of a result are equal.
    """

    any_order = False

    def __init__(self, op: Any, cx: Any) -> None:
        self.op, self.cx, self.axis = op, cx, op.dim
        self.function, self.first, self.neutrals = (list(map(cx.expr, e)) for e in (op.joined, op.first, op.identity))
        self.outs = [r.buffer for r in op.outs]
        held = next((r.buffer for r in op.srcs if r.buffer.scope_name == FRAGMENT), None)
        lay = None if held is None else cx.layout_of(held)
        if lay is not None and (op.commutative or in_order(lay.modes[self.axis])):
            self.partition = lay
        else:
            self.partition = memory_of_block(op.shape, self.axis, cx.num_threads, warp_of(cx))
            if not op.commutative:
                self.partition = neighbours(self.partition, self.axis)

    def lower(self) -> Stmt:
        """The per-thread statements."""
        self.partials = self.locals("part", self.kept_registers())
        across = [m for m in self.partition.modes[self.axis] if m.to == THREAD and m.size > 1][::-1]
        ascending = all(m.stride < n.stride for m, n in zip(across, across[1:]))
        by_lanes = self._in_whole_warps() and (ascending or self.op.commutative)
        lanes, warps = split_at_warp(across, warp_of(self.cx)) if by_lanes else ([], across)
        copies = [self._copied(r.buffer) for r in self.op.srcs]
        self.sources = [b for b, _ in copies]
        partial = self.partial(lanes)
        return seq(*[s for _, s in copies], partial,
                   self.direct(lanes) if not warps else self.through_shared(lanes, warps), span=self.op.span)

    def _copied(self, src: Buffer) -> tuple[Buffer, Stmt | None]:
        """(the buffer to read a source from, statements that fill it where the source's layout is another one)."""
        if src.scope_name != FRAGMENT or self.cx.layout_of(src) == self.partition:
            return src, None
        copy, span = self.cx.new_shared(f"{src.name}_copy", self.op.shape, src.dtype), self.op.span
        return copy, self.cx.parallel(self.op.shape, lambda at: Store(copy, at, load(src, at), span=span), span=span)

    def elements(self, dist: Distribution) -> Sequence[Expr]:
        """The state of the elements of one register."""
        cx = self.cx
        elements = [load(cx.local_of(b), (dist.register,)) if b.scope_name == FRAGMENT else cx.expr(load(b, dist.indices))
                    for b in self.sources]
        return given(tuple(self.first), {ELEMENT: elements, POSITION: [dist.indices[self.axis]]})  # type: ignore[no-any-return]

    def joined(self, into: list[Buffer], at: tuple[Any, ...], values: Sequence[Expr], span: Any = None) -> Stmt:
        """into[at] = what the state there and the values, after it, give."""
        new, values = bound(values)
        lowered = tuple(self.function) if into is self.partials else None  # else accesses are lowered with the loop around
        return seq(new, self.op.joined_into(into, at, values, lowered))

    def exchanges(self, at: tuple[Any, ...], m: Mode) -> list[Stmt]:
        """The states of two lanes combined in both, that of the lower one first."""
        out, mask, mine = list[Stmt](), m.stride, [load(s, at) for s in self.partials]
        while mask < m.stride * m.size:
            new, others = bound([from_lane(v, mask) for v in mine])
            upper = fresh("upper", "bool")
            bit = Binary("bitand", self.cx.thread, const(mask), self.cx.thread.dtype)
            (before, lower), (after, higher) = (bound([Select(upper, a, b, a.dtype, False) for a, b in zip(*sides)])
                                                for sides in ((others, mine), (mine, others)))
            joined, values = bound(given(tuple(self.function), {LEFT: lower, RIGHT: higher}))
            out.append(seq(new, Bind(upper, Binary("ne", bit, const(0), TRUE.dtype)), before, after, joined,
                           *[Store(s, at, v, span=self.op.span) for s, v in zip(self.partials, values)]))
            mask *= 2
        return out

    def scratch(self, shape: tuple[int, ...]) -> list[Buffer]:
        """Shared memory for states of this shape."""
        return [self.cx.new_shared(f"{p.name}s", shape, p.dtype) for p in self.partials]

    def result(self, values: Sequence[Expr], at: tuple[Any, ...], which: list[int]) -> Stmt:
        """Results of a state, stored where `at` gives the kept dimensions, or those with 0 along dim."""
        where = at if len(at) == len(self.op.shape) else (*at[:self.axis], const(0), *at[self.axis:])
        return self.op.stored(values, where, which)  # type: ignore[no-any-return]


def in_order(modes: Sequence[Mode]) -> bool:
    """Whether registers are the least significant digits of an index, in the order in which loops over them run."""
    sized = [m for m in modes if m.size > 1]
    first = next((k for k, m in enumerate(sized) if m.to == REGISTER), len(sized))
    registers = [m.stride for m in sized[first:]]
    return all(m.to == REGISTER for m in sized[first:]) and registers == sorted(registers, reverse=True)


def neighbours(lay: Fragment, axis: int) -> Fragment:
    """The layout with each thread's elements along axis beside each other."""
    modes = list(lay.modes)
    modes[axis] = tuple(sorted(modes[axis], key=lambda m: m.to != THREAD))
    return Fragment(lay.shape, modes, threads=lay.threads)
