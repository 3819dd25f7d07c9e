"""Lowering of scans: in each thread over its registers, then over the lanes of a warp, then over warps by shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tilelang.ir import (TRUE, Binary, Buffer, Expr, For, If, Select, Span, Stmt, Store, Var, const, convert, fresh, load,
                         logical, seq, substitute, unrolled)
from tilelang.ir.record import record
from tilelang.layout import REGISTER, THREAD, Fragment, Mode

from .distribute import conjunction, digit, from_fragment
from .lower_reduce import WARP, shuffled
from .states import Values

MOST_BYTES = 256  # of the registers of a thread that hold a piece of a tile in memory
ZERO = (const(0),)
Loops = list[tuple[Var, int]]
At = tuple[Expr, ...]


@record
class ScanSteps:
    """What is scanned.  A state is one or several values.

    element(at): the state of the element at a place.  store(at, state): stores the state of all elements up to that place.
    join(a, b): (bindings, the state of a followed by b).  neutral: the state that joined with another gives that one.
    """

    shape: tuple[int, ...]
    axis: int
    reverse: bool
    element: Callable[[At], Values]
    store: Callable[[At, Values], Stmt]
    join: Callable[[Values, Values], tuple[Stmt | None, Values]]
    neutral: Values
    span: Span | None

    def by_each_thread(self, cx: Any) -> Stmt:
        """The scan of arrays of each thread: element after element."""
        acc = [cx.new_local("acc", 1, e.dtype) for e in self.neutral]

        def line(at: At) -> Stmt:
            k, n = fresh("k"), self.shape[self.axis]
            where = (*at[:self.axis], n - 1 - k if self.reverse else k, *at[self.axis + 1:])
            new, values = self.join(got(acc, ZERO), self.element(where))
            step = seq(new, put(acc, ZERO, values), self.store(where, got(acc, ZERO)))
            return seq(put(acc, ZERO, self.neutral), For(k, const(0), const(n), "serial", step))

        return cx.private(tuple(1 if d == self.axis else n for d, n in enumerate(self.shape)), line, span=self.span)

    def lower(self, cx: Any, layout: Fragment | None) -> Stmt:
        """The scan in registers: of a tile with this layout if that serves, else piece by piece, each loaded and stored."""
        shape, axis, length, count = self.shape, self.axis, self.shape[self.axis], 1
        for d, n in enumerate(shape):
            count *= n if d != axis else 1
        whole = layout if layout is not None and scannable(layout, axis, cx.num_threads) else None
        if layout is not None and whole is None:  # staged in shared memory: a piece is no whole fragment
            staged = [cx.new_shared("scanned", shape, e.dtype) for e in self.neutral]
            there = dataclasses.replace(self, element=lambda at: got(staged, at), store=lambda at, v: put(staged, at, v))
            return seq(cx.parallel(shape, lambda at: put(staged, at, self.element(at)), span=self.span), there.lower(cx, None),
                       cx.parallel(shape, lambda at: self.store(at, got(staged, at)), span=self.span))
        own = whole or piece(length, count, axis == len(shape) - 1, cx.num_threads, sum(e.dtype.bits for e in self.neutral))
        lines, run = (count, length) if whole else own.shape
        pieces, block, step = -(-length // run), fresh("b"), fresh("c")
        tiles = [cx.new_fragment("scanned", own, e.dtype) for e in self.neutral]
        carry = [cx.new_local("carry", 1, e.dtype) for e in self.neutral] if pieces > 1 else []
        scan = RegisterScan(cx, tiles, len(own.shape) - 1 if whole is None else axis, self, carry)

        def place(at: At) -> tuple[At, Expr | None]:
            if whole:
                return at, None
            left, k = block * lines + at[0], (pieces - 1 - step if self.reverse else step) * run + at[1]
            inside = conjunction(left < count if count % lines else None, k < length if length % run else None)
            index: list[Expr] = [k] * len(shape)
            for d in reversed(range(len(shape))):
                if d != axis:
                    index[d], left = left % shape[d], left // shape[d]
            return tuple(index), inside

        def take(at: At) -> Stmt:
            where, inside = place(at)
            return put(tiles, at, [e if inside is None else Select(inside, e, n, n.dtype, True)
                                   for e, n in zip(self.element(where), self.neutral)])

        def give(at: At) -> Stmt:
            where, inside = place(at)
            out = self.store(where, got(tiles, at))
            return out if inside is None else If(inside, out, span=self.span)

        def body() -> Stmt:
            return seq(cx.parallel(own.shape, take, own, span=self.span), scan.stmts(),
                       cx.parallel(own.shape, give, own, span=self.span))

        return body() if whole else cx.loop(block, -(-count // lines), lambda: seq(
            put(carry, ZERO, scan.neutral), cx.loop(step, pieces, body)))


class RegisterScan:
    """Replaces the lines of tiles of states along `axis` by their inclusive scans, in the registers that hold them.

    carry: what precedes each line of a thread, which then holds what precedes the next piece of the line; []: nothing does.

    The digits of an index along the axis are scanned from the lowest.  After each digit `total` holds the state of all
    elements that agree in the digits above it, and `before` that of those of them that precede a run of registers.
    """

    def __init__(self, cx: Any, tiles: list[Buffer], axis: int, steps: ScanSteps, carry: list[Buffer]) -> None:
        self.cx, self.join, self.reverse, self.carry = cx, steps.join, steps.reverse, carry
        self.neutral = [cx.expr(e) for e in steps.neutral]
        self.frag: Fragment = cx.layout_of(tiles[0])
        self.local = [cx.local_of(t) for t in tiles]
        self.run, self.digits = digits_of(self.frag, axis)
        registers = [m for d, ms in enumerate(self.frag.modes) if d != axis for m in ms if m.to == REGISTER and m.size > 1]
        groups = [m for m in self.digits if m.to == REGISTER]
        self.lines: Loops = [(fresh("r"), m.size) for m in registers]
        self.groups: Loops = [(fresh("r"), m.size) for m in groups]  # lowest digit first
        self.here, self.register = flat(self.lines + self.groups), convert(0)
        size = 1
        for (v, n), m in zip(self.lines + self.groups, registers + groups):
            self.register, size = self.register + v * m.stride, size * n
        self.total, self.before = ([cx.new_local(name, size, t.dtype) for t in tiles] for name in ("total", "before"))
        self.own, self.other = ([cx.new_local(name, 1, t.dtype) for t in tiles] for name in ("acc", "other"))
        self.others = [m for d, ms in enumerate(self.frag.modes) if d != axis for m in ms if m.to == THREAD]

    def stmts(self) -> Stmt:
        """The statements of a thread."""
        out, done = [self._runs()], 0
        for m in self.digits:
            step = self._over_registers if m.to == REGISTER else self._over_warps if m.stride >= WARP else self._over_lanes
            out.append(step(m, done))
            done += m.to == REGISTER
        if self.carry:
            line = (flat(self.lines),)
            kept = got(self.carry, line)
            out.append(each(self.lines, seq(self._precede(done, kept), self._joined(
                kept, got(self.total, self._total(done)), self.carry, line))))
        k = fresh("k")
        out.append(each([*self.lines, *self.groups, (k, self.run.size)], self._joined(
            got(self.before, (self.here,)), got(self.local, self._at(k)), self.local, self._at(k))))
        return seq(*out)

    def _runs(self) -> Stmt:
        """Scan each run of registers."""
        k, n, idle = fresh("k"), self.run.size, from_fragment(self.frag, self.cx.thread).idle
        mine = None if idle is None else each([(k, n)], put(self.local, self._at(k), [
            Select(idle, v, e, e.dtype) for v, e in zip(got(self.local, self._at(k)), self.neutral)]))
        k = fresh("k")
        at, after = map(self._at, (n - 1 - k, n - 2 - k) if self.reverse else (k, k + 1))
        steps = unrolled([(k, n - 1)], self._joined(got(self.local, at), got(self.local, after), self.local, after))
        end = self._at(const(0 if self.reverse else n - 1))
        return each(self.lines + self.groups, seq(
            mine, steps if n > 1 else None, put(self.total, (self.here,), got(self.local, end)),
            put(self.before, (self.here,), self.neutral)))

    def _over_registers(self, m: Mode, done: int) -> Stmt:
        v, n = self.groups[done]
        c, own = fresh("c"), got(self.own, ZERO)
        step = substitute(seq(self._precede(done, own), self._joined(own, got(self.total, self._total(done)), self.own, ZERO)),
                          {v: n - 1 - c if self.reverse else c})
        return each(self.lines + self.groups[done + 1:], seq(
            put(self.own, ZERO, self.neutral), unrolled([(c, n)], step),
            put(self.total, self._total(done + 1), own)))

    def _over_lanes(self, m: Mode, done: int) -> Stmt:
        at, lane = digit(self.cx.thread, m.stride, m.size, self.cx.num_threads), self.cx.thread % WARP
        place, last = (m.size - 1 - at, 0) if self.reverse else (at, m.size - 1)
        end = lane + (last - at) * m.stride if m.size < WARP else const(last)
        shift, total = "shfl_down" if self.reverse else "shfl_up", self._total(done)
        return each(self.lines + self.groups[done:], seq(
            put(self.own, ZERO, got(self.total, total)), *self._inclusive(place, m.size, m.stride, shift),
            self._precede(done, self._from(shift, m.stride, place)), put(self.total, total, self._from("shfl_idx", end))))

    def _over_warps(self, m: Mode, done: int) -> Stmt:
        """First lanes of warps write what their lines come to into shared memory; the lanes of each warp scan that of all."""
        cx, rest, lane = self.cx, self.lines + self.groups[done:], self.cx.thread % WARP
        at = digit(cx.thread, m.stride, m.size, cx.num_threads)
        place, columns, slots = m.size - 1 - at if self.reverse else at, 1, 1
        column: Expr = const(0)
        for o in self.others:
            column, columns = column + digit(cx.thread, o.stride, o.size, cx.num_threads) * columns, columns * o.size
        for _, n in rest:
            slots *= n
        # The k makes shapes of their own: equal ones would be one buffer.
        scratch = [cx.exchange((m.size + k, columns, slots), t.dtype) for k, t in enumerate(self.own)]
        dist = from_fragment(self.frag, cx.thread)
        writer: Expr = Binary("eq", lane, const(0), TRUE.dtype)
        for alone in (dist.idle, dist.first):
            writer = writer if alone is None else logical("and", writer, alone)
        lanes, total = 1 << (m.size - 1).bit_length(), self._total(done)
        mine, to = lane % lanes, [cx.physical(s, (place, column, flat(rest))) for s in scratch]
        values = [cx.expr(load(s, (mine, column, flat(rest)))) for s in scratch]
        store = seq(*[Store(b, where, v) for (b, where), v in zip(to, got(self.total, total))])
        return seq(If(writer, each(rest, store)), each(rest, seq(
            put(self.own, ZERO, values if lanes == m.size else [
                Select(mine < m.size, v, e, e.dtype, True) for v, e in zip(values, self.neutral)]),
            *self._inclusive(mine, lanes, 1, "shfl_up"),
            self._precede(done, self._from("shfl_idx", (place + (WARP - 1)) % WARP, place)),
            put(self.total, total, self._from("shfl_idx", m.size - 1)))))

    def _inclusive(self, place: Expr, size: int, stride: int, shift: str) -> list[Stmt]:
        """own = its inclusive scan over the lanes of a digit, of which this one is in `place`."""
        out: list[Stmt] = []
        by = 1
        while by < size:
            out += [put(self.other, ZERO, self._from(shift, by * stride)),
                    self._joined(got(self.other, ZERO), got(self.own, ZERO), self.own, ZERO, place >= by)]
            by *= 2
        return out

    def _from(self, op: str, lane: Expr | int, place: Expr | None = None) -> Values:
        """own of another lane; the neutral state where the lane in `place` has none before it."""
        values = [shuffled(op, v, lane) for v in got(self.own, ZERO)]
        return values if place is None else [Select(place >= 1, v, e, e.dtype, False) for v, e in zip(values, self.neutral)]

    def _precede(self, done: int, values: Values) -> Stmt:
        """The runs of the digits so far are preceded by this state too."""
        here = (self.here,)
        return seq(put(self.other, ZERO, values), each(self.groups[:done], self._joined(
            got(self.other, ZERO), got(self.before, here), self.before, here)))

    def _joined(self, a: Values, b: Values, to: list[Buffer], at: At, when: Expr | None = None) -> Stmt:
        """to[at] = the state of a followed by b, where the condition holds."""
        new, values = self.join(a, b)
        return seq(new, put(to, at, values if when is None else [
            Select(when, v, old, v.dtype, False) for v, old in zip(values, got(to, at))]))

    def _total(self, done: int) -> At:
        return (substitute(self.here, {v: const(0) for v, _ in self.groups[:done]}),)

    def _at(self, k: Expr) -> At:
        return (self.register + k * self.run.stride,)


def got(buffers: list[Buffer], at: At) -> Values:
    """The state that arrays hold at an index."""
    return [load(b, at) for b in buffers]


def put(buffers: list[Buffer], at: At, values: Values) -> Stmt:
    """Store a state in arrays."""
    return seq(*[Store(b, at, v) for b, v in zip(buffers, values)])


def flat(loops: Loops) -> Expr:
    """The index of an iteration of a loop nest."""
    out: Expr = const(0)
    for v, n in loops:
        out = out * n + v
    return out


def each(loops: Loops, body: Stmt) -> Stmt:
    """The body for all values of the loops' variables, in loops over variables of their own."""
    own = {v: fresh(v.name) for v, _ in loops}
    return unrolled([(own[v], n) for v, n in loops], substitute(body, own))


def digits_of(frag: Fragment, axis: int) -> tuple[Mode, list[Mode]]:
    """(lowest digit of an index along the axis if it counts registers, the digits above it): those of threads cut at a warp."""
    low_first = [m for m in reversed(frag.modes[axis]) if m.size > 1]
    run = low_first.pop(0) if low_first and low_first[0].to == REGISTER else Mode(1, REGISTER, 1)
    out: list[Mode] = []
    for m in low_first:
        lanes = WARP // m.stride if m.to == THREAD and m.stride < WARP else 0
        if lanes and m.size > lanes and m.size % lanes == 0:
            out += [Mode(lanes, THREAD, m.stride), Mode(m.size // lanes, THREAD, m.stride * lanes)]
        else:
            out.append(m)
    return run, out


def scannable(frag: Fragment, axis: int, threads: int) -> bool:
    """Whether RegisterScan applies: groups of lanes lie in one warp; where a line crosses warps, all lanes of each hold it."""
    digits = [m for m in digits_of(frag, axis)[1] if m.to == THREAD]
    lanes = 1
    for m in digits:
        lanes *= m.size if m.stride < WARP else 1
    across = [m for m in digits if m.stride >= WARP]
    return not frag.is_padded and (not digits or threads % WARP == 0) and all(
        m.size <= WARP if m.stride >= WARP else WARP % (m.size * m.stride) == 0
        for m in digits) and (not across or lanes == WARP)


def piece(line: int, count: int, along_rows: bool, threads: int, bits: int) -> Fragment:
    """Distribution of a piece of `count` lines of `line` states that are scanned: (lines, elements of each).

    Lanes share a line, and warps where lines are few.  A thread scans a line across rows, or where no warp is whole.
    """
    run, lanes, warps = 1, 1, 1
    if threads % WARP == 0 and (along_rows or count < threads):
        while along_rows and run * 2 * bits <= 128 and line % (run * 2) == 0:
            run *= 2
        while lanes < WARP and lanes * run < line:
            lanes *= 2
        if lanes == WARP:
            warps = max(1, min(threads // WARP // min(count, threads // WARP), -(-line // (run * WARP)), WARP))
    most = max(1, MOST_BYTES * 8 // max(bits, 32) // run)
    groups = min(-(-line // (run * lanes * warps)), most)
    lines = min(count, threads // (lanes * warps))
    modes = ((Mode(lines, THREAD, lanes * warps),),
             (Mode(groups, REGISTER, run), Mode(warps, THREAD, lanes), Mode(lanes, THREAD, 1), Mode(run, REGISTER, 1)))
    return Fragment((lines, groups * lanes * warps * run), modes, threads=threads)
