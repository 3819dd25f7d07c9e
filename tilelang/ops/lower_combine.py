"""Lowering of reductions by a function: within each thread, then over the lanes of a row, then over warps by shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tilelang.ir import (TRUE, Binary, Bind, Buffer, Const, Expr, For, Region, Select, Stmt, Store, const, fresh,
                         load, seq, FRAGMENT)
from tilelang.layout import REGISTER, THREAD, Fragment, Mode

from .distribute import digit, from_fragment
from .lower_reduce import ReduceLowering, from_lane, in_whole_warps, memory_of_block, split_at_warp
from .states import ELEMENT, LEFT, POSITION, RIGHT, bound, given


class CombineLowering(ReduceLowering):
    """Lowers one reduction by a function (op: a Combine) to the statements of a thread.

    The elements of a row are combined in their order: registers first, where a thread's elements are neighbours, then lanes,
    then warps.  Where the layout of the source has another order and the function needs theirs, sources are copied to shared
    memory first.  Of two lanes the lower one's state is the left one in both, so that copies of a result are equal.
    """

    def __init__(self, op: Any, cx: Any) -> None:
        self.op, self.cx, self.axis = op, cx, op.dim
        held = next((r.buffer for r in op.srcs if r.buffer.scope_name == FRAGMENT), None)
        lay = None if held is None else cx.layout_of(held)
        if lay is not None and (op.commutative or in_order(lay.modes[self.axis])):
            self.partition = lay
        else:
            self.partition = memory_of_block(op.shape, self.axis, cx.num_threads)
            if not op.commutative:
                self.partition = neighbours(self.partition, self.axis)
        self.joined = tuple(map(cx.expr, op.joined))
        self.neutral_state = tuple(map(cx.expr, op.identity))

    def lower(self) -> Stmt:
        """The per-thread statements."""
        cx, span = self.cx, self.op.span
        dist = from_fragment(self.partition, cx.thread)
        count = 1
        for (_, n), d in zip(dist.axes, dist.axis_dims):
            count *= n if d != self.axis else 1
        self.states = self.op.locals(cx, "part", count)
        across = [m for m in self.partition.modes[self.axis] if m.to == THREAD and m.size > 1]
        whole = self._in_whole_warps() and all(m.stride < n.stride for m, n in zip(across[1:], across))
        lanes, warps = split_at_warp(across[::-1]) if whole or self.op.commutative and self._in_whole_warps() else (
            [], across[::-1])
        copies = [self._copied(r) for r in self.op.srcs]
        partial = self.partial_states(lanes, [b for b, _ in copies])
        rest = self.result_of_lanes(lanes) if not warps else self.result_of_warps(lanes, warps)
        return seq(*[s for _, s in copies], partial, rest, span=span)

    def _copied(self, r: Region) -> tuple[Buffer, Stmt | None]:
        """(the buffer to read a source from, statements that fill it where the source's layout is another one)."""
        src, cx = r.buffer, self.cx
        if src.scope_name != FRAGMENT or cx.layout_of(src) == self.partition:
            return src, None
        copy = cx.new_shared(f"{src.name}_copy", self.op.shape, src.dtype)
        return copy, cx.parallel(self.op.shape, lambda at: Store(copy, at, load(src, at), span=self.op.span), span=self.op.span)

    # ---- within threads and warps ------------------------------------------------------------------------------------

    def partial_states(self, lanes: list[Mode], sources: Sequence[Buffer]) -> Stmt:
        """states[p] = the states of this thread's elements combined, then those of the lanes of a warp."""
        cx, op = self.cx, self.op
        dist = from_fragment(self.partition, cx.thread)
        at = (self._place(dist),)
        elements = [load(cx.local_of(b), (dist.register,)) if b.scope_name == FRAGMENT else cx.expr(load(b, dist.indices))
                    for b in sources]
        first = given(tuple(map(cx.expr, op.first)), {ELEMENT: elements, POSITION: [dist.indices[self.axis]]})
        if dist.exists is not None and not (isinstance(dist.exists, Const) and dist.exists.value):
            first = tuple(Select(dist.exists, v, e, v.dtype, True) for v, e in zip(first, self.neutral_state))
        new, values = bound(first)
        own: Stmt = seq(new, op.joined_into(self.states, at, values, self.joined))
        for (v, n), d in reversed(list(zip(dist.axes, dist.axis_dims))):
            if d == self.axis:
                own = For(v, const(0), const(n), "unroll", own)
        steps = [Store(s, at, e) for s, e in zip(self.states, self.neutral_state)]
        exchange = [self._exchanged(at, 1 << k) for m in lanes
                    for k in range(m.stride.bit_length() - 1, (m.stride * m.size).bit_length() - 1)]
        out = seq(*steps, own, in_whole_warps(exchange, cx))
        for (v, n), d in reversed(list(zip(dist.axes, dist.axis_dims))):
            if d != self.axis:
                out = For(v, const(0), const(n), "unroll", out)
        return out

    def _exchanged(self, at: tuple[Any, ...], mask: int) -> Stmt:
        """The states of two lanes combined in both, that of the lower one first."""
        mine = [load(s, at) for s in self.states]
        new, others = bound([from_lane(v, mask) for v in mine])
        upper = fresh("upper", "bool")
        bit = Binary("bitand", self.cx.thread, const(mask), self.cx.thread.dtype)
        side = Bind(upper, Binary("ne", bit, const(0), TRUE.dtype))
        pairs = [bound([Select(upper, a, b, a.dtype, False) for a, b in zip(*sides)])
                 for sides in ((others, mine), (mine, others))]
        (before, lower), (after, higher) = pairs
        out, values = bound(given(self.joined, {LEFT: lower, RIGHT: higher}))
        return seq(new, side, before, after, out, *[Store(s, at, v, span=self.op.span) for s, v in zip(self.states, values)])

    # ---- results -----------------------------------------------------------------------------------------------------

    def _results(self, states: Sequence[Expr], k: int, at: tuple[Any, ...]) -> Stmt:
        """Result k, stored where `at` gives the kept dimensions, or those with 0 along dim."""
        where = at if len(at) == len(self.op.shape) else (*at[:self.axis], const(0), *at[self.axis:])
        return self.op.stored_out(k, states, where)

    def result_of_lanes(self, lanes: list[Mode]) -> Stmt:
        """Store where every thread that holds a state already has the final one."""
        out = []
        for k, r in enumerate(self.op.outs):
            dist, place = self._kept_distribution(lanes)  # with loop variables of its own
            states = [load(s, (place,)) for s in self.states]
            extents, indices = dist.extents, dist.indices
            if r.buffer.ndim > len(extents):  # dim kept as 1, or the (1,) of a 1-D source
                extents = (*extents[:self.axis], 1, *extents[self.axis:])
                indices = (*indices[:self.axis], const(0), *indices[self.axis:])
            out.append(self.cx.distributed(dataclasses.replace(dist, extents=extents, indices=indices),
                                           lambda at, k=k, states=states: self._results(states, k, at), span=self.op.span))
        return seq(*out)

    def result_of_warps(self, lanes: list[Mode], warps: list[Mode]) -> Stmt:
        """Each group of lanes writes its states to shared memory; each holder of a result combines them in their order.

        warps: the digits of the groups, the least significant along dim first.
        """
        cx, op = self.cx, self.op
        dist, place = self._kept_distribution(lanes)
        groups, group = 1, const(0)
        for m in warps:
            group = group + digit(cx.thread, m.stride, m.size, cx.num_threads) * groups  # type: ignore[assignment]
            groups *= m.size
        scratch = [cx.new_shared(f"{s.name}s", (groups, *dist.extents), s.dtype) for s in self.states]
        dist = dataclasses.replace(dist, extents=(groups, *dist.extents), indices=(group, *dist.indices))
        put = cx.distributed(dist, lambda at: seq(*[Store(b, at, load(s, (place,)), span=op.span)
                                                    for b, s in zip(scratch, self.states)]), span=op.span)
        acc, zero, rank = op.locals(cx, "acc"), (const(0),), len(dist.extents) - 1

        def take(at: tuple[Any, ...], ks: list[int]) -> Stmt:
            g = fresh("g")
            inner = at if len(at) == rank else tuple(i for d, i in enumerate(at) if d != self.axis)
            add = op.joined_into(acc, zero, [load(b, (g, *inner)) for b in scratch])
            return seq(*[Store(a, zero, e) for a, e in zip(acc, op.identity)],
                       For(g, const(0), const(groups), "unroll", add),
                       *[self._results([load(a, zero) for a in acc], k, at) for k in ks])

        alike: dict[Any, list[int]] = {}
        for k, r in enumerate(op.outs):
            held = cx.layout_of(r.buffer) if r.buffer.scope_name == FRAGMENT else None
            alike.setdefault((repr(held), tuple(r.buffer.shape)), []).append(k)
        return seq(put, *[cx.parallel(shape, lambda at, ks=ks: take(at, ks), span=op.span) for (_, shape), ks in alike.items()])


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


__all__ = ["CombineLowering", "in_order", "neighbours"]
