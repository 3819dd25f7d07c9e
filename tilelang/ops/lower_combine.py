"""Lowering of reductions by a function: within each thread, then over the lanes of a row, then over warps by shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang.ir import TRUE, Binary, Bind, Buffer, Expr, Select, Stmt, Store, const, fresh, load, seq, FRAGMENT
from tilelang.layout import REGISTER, THREAD, Fragment, Mode

from .distribute import Distribution
from .lower_reduce import ReduceLowering, from_lane, memory_of_block, split_at_warp, warp_of
from .states import ELEMENT, LEFT, POSITION, RIGHT, bound, given


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
