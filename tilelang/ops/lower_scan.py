"""Lowering of scans: in each thread over its registers, then over the lanes of a warp, then over warps by shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import (TRUE, Binary, Buffer, Expr, For, If, Select, Span, Stmt, Store, Var, call, cast, const, convert, fresh,
                         load, logical, seq, substitute)
from tilelang.layout import REGISTER, THREAD, Fragment, Mode

from .distribute import digit, from_fragment

WARP = 32
MOST_BYTES = 256  # of the registers of a thread that hold a piece of a tile in memory
ZERO = (const(0),)
Loops = list[tuple[Var, int]]


class RegisterScan:
    """Replaces the lines of a fragment along `axis` by their inclusive scans, in the registers that hold them.

    combine(a, b): two neighbours combined, a before b.  carry: what precedes each line of a thread, in a per-thread array
    that then holds what precedes the next piece of the line; None: nothing does.

    The digits of an index along the axis are scanned from the lowest.  After each digit `total` holds the combination of all
    elements that agree in the digits above it, and `before` that of those of them that precede a run of registers.
    """

    def __init__(self, cx: Any, tile: Buffer, axis: int, combine: Callable[[Expr, Expr], Expr], neutral: Expr, reverse: bool,
                 carry: Buffer | None = None) -> None:
        self.cx, self.combine, self.neutral, self.reverse, self.carry = cx, combine, neutral, reverse, carry
        self.frag: Fragment = cx.layout_of(tile)
        self.local, self.dtype = cx.local_of(tile), tile.dtype
        self.run, self.digits = digits_of(self.frag, axis)
        registers = [m for d, ms in enumerate(self.frag.modes) if d != axis for m in ms if m.to == REGISTER and m.size > 1]
        groups = [m for m in self.digits if m.to == REGISTER]
        self.lines: Loops = [(fresh("r"), m.size) for m in registers]
        self.groups: Loops = [(fresh("r"), m.size) for m in groups]  # lowest digit first
        self.here: Expr = const(0)
        self.register: Expr = const(0)
        size = 1
        for (v, n), m in zip(self.lines + self.groups, registers + groups):
            self.here, self.register, size = self.here * n + v, self.register + v * m.stride, size * n
        self.total, self.before = (cx.new_local(f"{tile.name}_{n}", size, self.dtype) for n in ("total", "before"))
        self.own = cx.new_local(f"{tile.name}_acc", 1, self.dtype)
        self.others = [m for d, ms in enumerate(self.frag.modes) if d != axis for m in ms if m.to == THREAD and m.size > 1]

    def stmts(self) -> Stmt:
        """The statements of a thread."""
        out, done = [self._runs()], 0
        for m in self.digits:
            step = self._over_registers if m.to == REGISTER else self._over_warps if m.stride >= WARP else self._over_lanes
            out.append(step(m, done))
            done += m.to == REGISTER
        if self.carry is not None:
            line = substitute(self.here, {v: const(0) for v, _ in self.groups})
            at = (flat(self.lines),)
            kept = load(self.carry, at)
            out.append(each(self.lines, seq(self._precede(done, kept), Store(
                self.carry, at, self.combine(kept, load(self.total, (line,)))))))
        k = fresh("k")
        out.append(each([*self.lines, *self.groups, (k, self.run.size)], self._put(
            k, self.combine(load(self.before, (self.here,)), self._got(k)))))
        return seq(*out)

    def _runs(self) -> Stmt:
        """Scan each run of registers."""
        k, n, idle = fresh("k"), self.run.size, from_fragment(self.frag, self.cx.thread).idle
        mine = None if idle is None else each([(k, n)], self._put(k, Select(idle, self._got(k), self.neutral, self.dtype)))
        k = fresh("k")
        at, after = (n - 1 - k, n - 2 - k) if self.reverse else (k, k + 1)
        steps = For(k, const(0), const(n - 1), "unroll", self._put(after, self.combine(self._got(at), self._got(after))))
        return each(self.lines + self.groups, seq(
            mine, steps if n > 1 else None, Store(self.total, (self.here,), self._got(const(0 if self.reverse else n - 1))),
            Store(self.before, (self.here,), self.neutral)))

    def _over_registers(self, m: Mode, done: int) -> Stmt:
        v, n = self.groups[done]
        c = fresh("c")
        own, all_of = load(self.own, ZERO), self._total(done)
        step = substitute(seq(self._precede(done, own), Store(self.own, ZERO, self.combine(own, load(self.total, all_of)))),
                          {v: n - 1 - c if self.reverse else c})
        return each(self.lines + self.groups[done + 1:], seq(
            Store(self.own, ZERO, self.neutral), For(c, const(0), const(n), "unroll", step),
            Store(self.total, self._total(done + 1), own)))

    def _over_lanes(self, m: Mode, done: int) -> Stmt:
        at, lane = digit(self.cx.thread, m.stride, m.size, self.cx.num_threads), self.cx.thread % WARP
        place = m.size - 1 - at if self.reverse else at
        end = lane + ((0 if self.reverse else m.size - 1) - at) * m.stride if m.size < WARP else const(
            0 if self.reverse else WARP - 1)
        own, shift = load(self.own, ZERO), "shfl_down" if self.reverse else "shfl_up"
        return each(self.lines + self.groups[done:], seq(
            Store(self.own, ZERO, load(self.total, self._total(done))), *self._inclusive(place, m.size, m.stride, shift),
            self._precede(done, self._or_neutral(place, shuffled(shift, own, const(m.stride)))),
            Store(self.total, self._total(done), shuffled("shfl_idx", own, end))))

    def _over_warps(self, m: Mode, done: int) -> Stmt:
        """First lanes of warps write what their lines come to into shared memory; the lanes of each warp scan that of all."""
        cx, rest, lane = self.cx, self.lines + self.groups[done:], self.cx.thread % WARP
        at = digit(cx.thread, m.stride, m.size, cx.num_threads)
        place, columns = m.size - 1 - at if self.reverse else at, 1
        column: Expr = const(0)
        for o in self.others:
            column, columns = column + digit(cx.thread, o.stride, o.size, cx.num_threads) * columns, columns * o.size
        slots = 1
        for _, n in rest:
            slots *= n
        scratch = cx.exchange((m.size, columns, slots), self.dtype)
        dist = from_fragment(self.frag, cx.thread)
        writer: Expr = Binary("eq", lane, const(0), TRUE.dtype)
        for alone in (dist.idle, dist.first):
            writer = writer if alone is None else logical("and", writer, alone)
        buffer, where = cx.physical(scratch, (place, column, flat(rest)))
        put = each(rest, Store(buffer, where, load(self.total, self._total(done))))
        lanes = 1 << (m.size - 1).bit_length()
        mine, own = lane % lanes, load(self.own, ZERO)
        value = cx.expr(load(scratch, (mine, column, flat(rest))))
        take = each(rest, seq(
            Store(self.own, ZERO, value if lanes == m.size else Select(mine < m.size, value, self.neutral, self.dtype, True)),
            *self._inclusive(mine, lanes, 1, "shfl_up"),
            self._precede(done, self._or_neutral(place, shuffled("shfl_idx", own, (place + (WARP - 1)) % WARP))),
            Store(self.total, self._total(done), shuffled("shfl_idx", own, const(m.size - 1)))))
        return seq(If(writer, put), take)

    def _inclusive(self, place: Expr, size: int, stride: int, shift: str) -> list[Stmt]:
        """own = its inclusive scan over the lanes of a digit, of which this one is in `place`."""
        own, by = load(self.own, ZERO), 1
        out: list[Stmt] = []
        while by < size:
            near = self.combine(shuffled(shift, own, const(by * stride)), own)
            out.append(Store(self.own, ZERO, Select(place >= by, near, own, self.dtype, False)))
            by *= 2
        return out

    def _or_neutral(self, place: Expr, value: Expr) -> Expr:
        return Select(place >= 1, value, self.neutral, self.dtype, False)

    def _precede(self, done: int, value: Expr) -> Stmt:
        """The runs of the digits so far are preceded by this value too."""
        own = self.cx.new_local("first", 1, self.dtype)
        new = Store(self.before, (self.here,), self.combine(load(own, ZERO), load(self.before, (self.here,))))
        return seq(Store(own, ZERO, value), each(self.groups[:done], new))

    def _total(self, done: int) -> tuple[Expr, ...]:
        return (substitute(self.here, {v: const(0) for v, _ in self.groups[:done]}),)

    def _got(self, k: Expr) -> Expr:
        return load(self.local, (self.register + k * self.run.stride,))

    def _put(self, k: Expr, value: Expr) -> Stmt:
        return Store(self.local, (self.register + k * self.run.stride,), value)


def flat(loops: Loops) -> Expr:
    """The index of an iteration of a loop nest."""
    out: Expr = const(0)
    for v, n in loops:
        out = out * n + v
    return out


def each(loops: Loops, body: Stmt) -> Stmt:
    """The body for all values of the loops' variables, in loops over variables of their own."""
    own = {v: fresh(v.name) for v, _ in loops}
    body = substitute(body, own)
    for v, n in reversed(loops):
        body = For(own[v], const(0), const(n), "unroll", body)
    return body


def warp_chunks(cx: Any, shape: tuple[int, ...], axis: int, reverse: bool, start: Stmt,
                step: Callable[[Expr, tuple[Expr, ...], Expr], tuple[Stmt, Stmt]], span: Span | None) -> Stmt:
    """Each warp goes over its lines along axis, 32 elements at a time.

    start: statements before each line.  step(whether this lane has an element, its indices, the lane): (statements of all
    lanes, those of lanes that have an element).
    """
    warps, lane = cx.num_threads // WARP, cx.thread % WARP
    it, chunk = fresh("it"), fresh("c")
    line = it * warps + cx.thread // WARP
    place = chunk * WARP + lane
    index: list[Expr] = [const(0)] * len(shape)
    left, count = line, 1
    for d in reversed(range(len(shape))):
        if d != axis:
            index[d] = left % shape[d]
            left, count = left // shape[d], count * shape[d]
    index[axis] = const(shape[axis] - 1) - place if reverse else place
    inside = place < shape[axis]
    steps, stores = step(inside, tuple(index), lane)
    body = For(chunk, const(0), const(-(-shape[axis] // WARP)), "serial", seq(steps, If(inside, stores)))
    whole = seq(start, body)
    guarded = whole if count % warps == 0 else If(line < count, whole)  # uniform within a warp
    return For(it, const(0), const(-(-count // warps)), "serial", guarded, span=span)


def shuffled(op: str, value: Expr, lane: Expr | int) -> Expr:
    """The value of another lane; shuffles move 32-bit registers, so narrower types are converted."""
    dt = value.dtype
    if dt.is_int and dt.bits < 32:
        return cast(call(op, (cast(value, "int32"), convert(lane)), "int32", width=WARP), dt)
    return call(op, (value, convert(lane)), dt, width=WARP)


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
    """Whether RegisterScan applies: lanes are a power of two, and where a line crosses warps, all lanes of a warp hold it."""
    digits = [m for m in digits_of(frag, axis)[1] if m.to == THREAD]
    lanes = 1
    for m in digits:
        lanes *= m.size if m.stride < WARP else 1
    across = [m for m in digits if m.stride >= WARP]
    return not frag.is_padded and (not digits or threads % WARP == 0) and all(
        m.size <= WARP if m.stride >= WARP else m.size * m.stride <= WARP and m.size & (m.size - 1) == 0
        for m in digits) and (not across or lanes == WARP)


def piece(line: int, count: int, along_rows: bool, threads: int, bits: int) -> Fragment:
    """Distribution of a piece of `count` lines of `line` elements that are scanned: (lines, elements of each).

    Lanes share a line, and warps too where there are few lines.  Lines across rows, or of a block without whole warps, are
    scanned by one thread each.
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


__all__ = ["RegisterScan", "piece", "scannable", "shuffled", "warp_chunks"]
