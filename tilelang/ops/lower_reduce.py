"""Lowering of reductions: within each thread, then over the lanes that hold a row, then over warps by shared memory."""

from __future__ import annotations

import math
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from tilelang.ir import (Binary, Buffer, Const, Expr, For, If, LoopPlan, Select, Stmt, Store, call, cast, const, convert, dtype,
                         fresh, load, replace, seq, substitute, unrolled, FRAGMENT, PRIVATE, TRUE)
from tilelang.layout import REGISTER, THREAD, Fragment, Mode

from .distribute import Distribution, conjunction, digit, from_fragment

WARP = 32
FEW = 4  # elements of a thread whose reduction begins with the first one, not with the neutral element


class ReduceLowering:
    """Lowers one reduction to the statements of a thread.

    op: the Reduce.  combine_op: name of the Binary that combines two elements.  neutral: its neutral element.
    partials: arrays of this thread's partial results; outs: buffers of the results; neutrals: values that partial results
    begin with.  CombineLowering (combine.py) has several of each.
    """

    partition: Fragment
    partials: list[Buffer]
    any_order = True  # of the elements of a thread
    spread = False  # see ReducePlan

    def __init__(self, op: Any, cx: Any, combine_op: str, neutral: Any) -> None:
        self.op, self.cx, self.combine_op = op, cx, combine_op
        self.src, self.dst = op.src.buffer, op.dst.buffer
        self.axis = op.dim % self.src.ndim
        self.acc_dtype: dtype = self.dst.dtype
        self.neutral = const(neutral, self.acc_dtype)
        self.outs, self.neutrals, self.spread = [self.dst], [self.neutral], op.plan.spread

    def lower(self) -> Stmt:
        """The per-thread statements."""
        src = self.src
        if src.scope_name in PRIVATE:
            return self.in_one_thread()
        shape = tuple(int(n) for n in src.shape)
        self.partition = self.cx.layout_of(src) if src.scope_name == FRAGMENT else \
            memory_of_block(shape, self.axis, self.cx.num_threads, warp_of(self.cx))
        self.partials = self.locals("part", self.kept_registers())
        across = [m for m in self.partition.modes[self.axis] if m.to == THREAD and m.size > 1]
        lanes, warps = split_at_warp(across, warp_of(self.cx)) if self._in_whole_warps() else ([], across)
        own = self.spread or not warps
        partial = self.partial([] if self.spread else lanes)
        return seq(partial, self.direct(across) if own else self.through_shared(lanes, warps), span=self.op.span)

    def kept_registers(self) -> int:
        """How many of a thread's registers differ in a dimension that is kept."""
        dist = from_fragment(self.partition, self.cx.thread)
        return math.prod(n for (_, n), d in zip(dist.axes, dist.axis_dims) if d != self.axis)

    def locals(self, name: str, size: int = 1) -> list[Buffer]:
        """Arrays of each thread for `size` partial results."""
        return [self.cx.new_local(f"{self.outs[0].name}_{name}", size, e.dtype) for e in self.neutrals]

    def _in_whole_warps(self) -> bool:
        """Whether every thread that holds data is in a full warp, which shuffles require."""
        digits = [m for ms in self.partition.modes for m in ms if m.to == THREAD] + list(self.partition.copies)
        warp = warp_of(self.cx)
        return 1 + sum((m.size - 1) * m.stride for m in digits) <= self.cx.num_threads // warp * warp

    # ---- values of one step ----------------------------------------------------------------------------------------

    def converted(self, e: Expr) -> Expr:
        """An input element, converted for the reduction."""
        e = cast(e, self.acc_dtype)
        if self.op.kind in ("abssum", "absmax"):
            if self.acc_dtype.is_float:
                return call("fabs", (e,), self.acc_dtype)
            if self.acc_dtype.is_signed:
                return Select(Binary("lt", e, const(0, e.dtype), TRUE.dtype), -e, e, e.dtype, False)
        return e

    def combine(self, a: Expr, b: Expr) -> Expr:
        """Two values combined."""
        out = Binary(self.combine_op, a, b, a.dtype)
        if not self.op.nan_propagate or self.combine_op not in ("max", "min") or not a.dtype.is_float:
            return out
        b_nan = Select(Binary("ne", b, b, TRUE.dtype), b, out, a.dtype, False)
        return Select(Binary("ne", a, a, TRUE.dtype), a, b_nan, a.dtype, False)

    def result(self, values: Sequence[Expr], at: tuple[Any, ...], which: list[int]) -> Stmt:
        """dst[at] = value, combined with the old contents unless the op clears them.  which: the results that are stored."""
        (value,) = values
        if not self.op.clear:
            value = self.combine(load(self.dst, at), value)
        return Store(self.dst, tuple(convert(i) for i in at), value, span=self.op.span)

    def joined(self, into: list[Buffer], at: tuple[Any, ...], values: Sequence[Expr], span: Any = None) -> Stmt:
        """into[at] = what it holds and the values combined."""
        return Store(into[0], at, self.combine(load(into[0], at), values[0]), span=span)

    def exchanges(self, at: tuple[Any, ...], m: Mode) -> list[Stmt]:
        """Partial results combined over the lanes of one thread digit, in each of them."""
        mine = load(self.partials[0], at)
        return [self.joined(self.partials, at, [from_lane(mine, mask)], self.op.span) for mask in masks(m)]

    def scratch(self, shape: tuple[int, ...]) -> list[Buffer]:
        """Shared memory for partial results of this shape."""
        return [self.cx.exchange(shape, self.acc_dtype)]

    def elements(self, dist: Distribution) -> Sequence[Expr]:
        """The partial results that the element of one register begins."""
        if self.src.scope_name == FRAGMENT:
            return [self.converted(load(self.cx.local_of(self.src), (dist.register,)))]
        return [self.converted(self.cx.expr(load(self.src, dist.indices)))]

    def kept(self, indices: tuple[Any, ...]) -> tuple[Any, ...]:
        """The indices of dst that correspond to indices of src."""
        out = tuple(i for d, i in enumerate(indices) if d != self.axis)
        if self.dst.ndim == len(indices):
            return tuple(const(0) if d == self.axis else i for d, i in enumerate(indices))
        return out or (const(0),)

    def _place(self, dist: Distribution) -> Expr:
        """The partial result that a point contributes to: row-major over the dimensions that are kept."""
        out: Expr = const(0)
        for (v, n), d in zip(dist.axes, dist.axis_dims):
            if d != self.axis:
                out = out * n + v
        return out

    def partial(self, lanes: list[Mode]) -> Stmt:
        """partials[p] = reduction over this thread's registers, then over the lanes of a warp."""
        dist = from_fragment(self.partition, self.cx.thread)
        at = (self._place(dist),)
        values = self.elements(dist)
        if dist.exists is not None and not (isinstance(dist.exists, Const) and dist.exists.value):
            values = [Select(dist.exists, v, e, v.dtype, True) for v, e in zip(values, self.neutrals)]
        own = self._looped(dist, True, self.joined(self.partials, at, values, self.op.span), self.any_order)
        begin: Sequence[Expr] = self.neutrals
        if self.spread and isinstance(own, For) and not isinstance(own.body, For) and isinstance(
                own.extent, Const) and own.extent.value <= FEW:
            begin = [substitute(v, {own.var: const(0)}) for v in values]
            own = replace(own, start=const(1), extent=own.extent - 1)
        start = [Store(p, at, e) for p, e in zip(self.partials, begin)]
        exchange = [x for m in lanes for x in self.exchanges(at, m)]
        return self._looped(dist, False, seq(*start, own, in_whole_warps(exchange, self.cx)))

    def _looped(self, dist: Distribution, along: bool, body: Stmt, any_order: bool = False) -> Stmt:
        """The body in loops over this thread's registers along the reduced dimension, or over its others."""
        for (v, n), d in reversed(list(zip(dist.axes, dist.axis_dims))):
            if (d == self.axis) == along:
                body = For(v, const(0), const(n), "unroll", body, plan=LoopPlan(any_order=any_order))
        return body

    def _kept_distribution(self, lanes: list[Mode]) -> tuple[Distribution, Expr]:
        """The points of the reduced tile as the threads of the source hold them, and the partial result of each.

        lanes: thread digits whose threads hold the same partial result.
        """
        cx = self.cx
        dist = from_fragment(self.partition, cx.thread)
        kept = [d for d in range(len(dist.extents)) if d != self.axis]
        first = dist.first
        for m in lanes:
            zero = Binary("eq", digit(cx.thread, m.stride, m.size, cx.num_threads), const(0), TRUE.dtype)
            first = conjunction(first, zero)
        out = Distribution(tuple(dist.extents[d] for d in kept), cx.thread, cx.num_threads,
                           tuple(a for a, d in zip(dist.axes, dist.axis_dims) if d != self.axis), None, 0,
                           tuple(dist.indices[d] for d in kept),
                           conjunction(dist.idle, *[dist.paddings[d] for d in kept]), first)
        return out, self._place(dist)

    def direct(self, lanes: list[Mode]) -> Stmt:
        """Store where every thread that holds a partial result already has the final one."""
        stores = []
        for k, out in enumerate(self.outs):
            dist, place = self._kept_distribution(lanes)
            extents, indices = dist.extents, dist.indices
            if out.ndim > len(extents):  # dim kept as 1, or the (1,) of a 1-D source
                extents = (*extents[:self.axis], 1, *extents[self.axis:])
                indices = (*indices[:self.axis], const(0), *indices[self.axis:])
            dist, mine = dataclasses.replace(dist, extents=extents, indices=indices), [load(p, (place,)) for p in self.partials]
            stores.append(self.cx.distributed(dist, partial(self.result, mine, which=[k]), span=self.op.span))
        return seq(*stores)

    def through_shared(self, lanes: list[Mode], warps: list[Mode]) -> Stmt:
        """Each group of lanes writes a partial result to shared memory; each holder of a result combines them.

        warps: the digits of the groups, the one of the next group first.
        """
        cx, span = self.cx, self.op.span
        dist, place = self._kept_distribution(lanes)
        groups = 1
        group: Expr = const(0)
        for m in warps:
            group = group + digit(cx.thread, m.stride, m.size, cx.num_threads) * groups
            groups *= m.size
        scratch = self.scratch((groups, *dist.extents))
        dist = dataclasses.replace(dist, extents=(groups, *dist.extents), indices=(group, *dist.indices))
        put = cx.distributed(dist, lambda at: seq(*[Store(b, at, load(p, (place,)), span=span)
                                                    for b, p in zip(scratch, self.partials)]), span=span)
        acc, zero, rank = self.locals("acc"), (const(0),), len(dist.extents) - 1

        def take(at: tuple[Any, ...], which: list[int]) -> Stmt:
            k = fresh("g")
            inner = at if len(at) == rank else tuple(i for d, i in enumerate(at) if d != self.axis)
            add = self.joined(acc, zero, [load(b, (k, *inner)) for b in scratch])
            return seq(*[Store(a, zero, e) for a, e in zip(acc, self.neutrals)],
                       unrolled([(k, groups)], add),
                       self.result([load(a, zero) for a in acc], at, which))

        alike: dict[Any, list[int]] = {}  # results that one loop can store
        for n, out in enumerate(self.outs):
            held = cx.layout_of(out) if out.scope_name == FRAGMENT else None
            alike.setdefault((repr(held), tuple(out.shape)), []).append(n)
        return seq(put, *[cx.parallel(shape, partial(take, which=which), span=span) for (_, shape), which in alike.items()])

    def in_one_thread(self) -> Stmt:
        """Reduce where source and destination are private to each thread."""
        shape, span = tuple(map(int, self.src.shape)), self.op.span

        def line(at: tuple[Any, ...]) -> Stmt:
            k, to = fresh("k"), self.kept(at)
            element = self.converted(load(self.src, (*at[:self.axis], k, *at[self.axis + 1:])))
            add = Store(self.dst, to, self.combine(load(self.dst, to), element), span=span)
            return seq(Store(self.dst, to, self.neutral) if self.op.clear else None, unrolled([(k, shape[self.axis])], add))

        return self.cx.private(tuple(1 if d == self.axis else n for d, n in enumerate(shape)), line, span=span)


def shuffled(op: str, value: Expr, lane: Expr | int, width: int = WARP) -> Expr:
    """The value of another lane; shuffles move 32-bit registers, so narrower types are converted."""
    dt, at = value.dtype, convert(lane)
    if dt.is_bool or (dt.is_int and dt.bits < 32):
        return cast(call(op, (cast(value, "int32"), at), "int32", width=width), dt)
    return call(op, (value, at), dt, width=width)


def from_lane(value: Expr, mask: int) -> Expr:
    """The value of the lane whose number is this lane's XOR mask."""
    return shuffled("shfl_xor", value, mask, max(WARP, 2 * mask))


def warp_of(cx: Any) -> int:
    """Lanes that exchange values by shuffles: those of the target's warps where the threads are whole ones of them, else 32."""
    lanes = getattr(cx.target, "warp_size", WARP)
    return lanes if cx.num_threads % lanes == 0 else WARP


def masks(m: Mode) -> list[int]:
    """The masks of a butterfly over a thread digit, the greatest first."""
    return [m.stride << k for k in reversed(range(m.size.bit_length() - 1))]


def in_whole_warps(exchange: list[Stmt], cx: Any) -> Stmt | None:
    """The shuffle steps, executed by full warps only: threads of a last partial warp hold no data and lack shuffle partners."""
    warp = warp_of(cx)
    if exchange and cx.num_threads % warp:
        return If(cx.thread < cx.num_threads // warp * warp, seq(*exchange))
    return seq(*exchange) if exchange else None


def split_at_warp(modes: list[Mode], warp: int) -> tuple[list[Mode], list[Mode]]:
    """(thread digits that butterflies within a warp can reduce over, the other digits).

    Of a digit whose size is no power of two, the largest power of two that divides it: 640 threads are 20 groups of 32.
    """
    lanes: list[Mode] = []
    rest: list[Mode] = []
    for m in modes:
        inside = min(m.size & -m.size, warp // m.stride) if _power_of_two(m.stride) else 0
        if inside < min(m.size, 2):
            rest.append(m)
            continue
        lanes.append(Mode(inside, THREAD, m.stride))
        if inside < m.size:
            rest.append(Mode(m.size // inside, THREAD, m.stride * inside))
    return lanes, rest


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def memory_of_block(shape: tuple[int, ...], axis: int, threads: int, warp: int) -> Fragment:
    """Distribution of a shared-memory tile that is reduced along axis: lanes along axis, further threads over the longest kept
    dimension, the rest in sequence."""
    along = 1
    while along * 2 <= min(warp, shape[axis]) and threads % (along * 2) == 0:
        along *= 2
    kept = [d for d in range(len(shape)) if d != axis]
    widest = max(kept, key=lambda d: shape[d]) if kept else None
    modes: list[tuple[Mode, ...]] = []
    step = 1
    for d in reversed(range(len(shape))):
        across, stride = (along, 1) if d == axis else (threads // along, along) if d == widest else (1, 1)
        if d == widest:
            across = min(across, shape[d])
        own = -(-shape[d] // across)
        modes.insert(0, (Mode(own, REGISTER, step), Mode(across, THREAD, stride)))
        step *= own
    return Fragment(shape, modes, threads=threads)
