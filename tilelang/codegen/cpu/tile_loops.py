"""Tile operations as loop nests: copy, fill, transpose, atomic.

A nest over a region of a global buffer is emitted twice when it cannot be proven in range: once with constant bounds,
taken when the whole region is inside, and once with the bounds clipped per dimension (edge tiles).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilelang.ir import Buffer, Region, GLOBAL
from tilelang.ops import AtomicTile, Copy, Fill, Transpose
from tilelang.target.cpu_launch import TileLoops, TileSide

from .atomics import atomic_update
from .code import Code
from .text import is_literal
from .types import convert, load, store, value_type


@dataclass
class Side:
    """One operand: its buffer, the region's start (i64 per dimension), and the loop of each dimension."""

    buffer: Buffer
    mins: list[str]
    plan: TileSide

    def address(self, cx: Code, at: list[str]) -> str:
        """The address of the element at loop counters `at`."""
        indices = [m if k < 0 else cx.f.add(at[k], m) for m, k in zip(self.mins, self.plan.loop_of)]
        return cx.address(self.buffer, indices)


def mins_of(cx: Code, r: Region) -> list[str]:
    """The start of a region, i64 per dimension."""
    return [cx.index(m) for m in r.mins]


@dataclass
class Clip:
    """The guards of one side, evaluated before the nest.

    low, high: per loop, the counters inside the buffer (only for loops that need it). ok: i1, whether the fixed dimensions are
    inside. inside: i1, whether the whole region is.
    """

    low: dict[int, str]
    high: dict[int, str]
    ok: str
    inside: str

def clip(cx: Code, side: Side, sizes: list[str]) -> Clip:
    """The guards of one side of a tile operation. sizes: loop extents as i64."""
    f, shape = cx.f, side.buffer.shape
    out = Clip({}, {}, "true", "true")
    for d in side.plan.guarded:
        out.ok = f.both(out.ok, f.let(f"icmp ult i64 {side.mins[d]}, {cx.index(shape[d])}"))
    out.inside = out.ok
    for k, d in side.plan.clipped:
        low = f.smax(f.sub("0", side.mins[d]), "0")
        high = f.smin(f.sub(cx.index(shape[d]), side.mins[d]), sizes[k])
        out.low[k], out.high[k] = low, high
        if is_literal(sizes[k]):
            whole = f.both(f.let(f"icmp eq i64 {low}, 0"), f.let(f"icmp eq i64 {high}, {sizes[k]}"))
            out.inside = f.both(out.inside, whole)
        else:
            out.inside = "false"  # without a constant extent, the clipped nest is as fast
    return out


Body = Callable[[list[str]], None]


def nest(cx: Code, sizes: list[str], low: dict[int, str], high: dict[int, str], body: Body) -> None:
    """Loops over [low, high) per dimension (default 0 .. size), last dimension innermost."""

    def level(k: int, at: list[str]) -> None:
        if k == len(sizes):
            body(at)
            return
        start, stop = low.get(k, "0"), high.get(k, sizes[k])
        if start == "0" and stop == "1":
            level(k + 1, [*at, "0"])
            return
        with cx.f.loop(start, stop, hint="v") as i:
            level(k + 1, [*at, i])

    level(0, [])


def _versions(cx: Code, inside: str, fast: Callable[[], None], clipped: Callable[[], None]) -> None:
    if inside == "true":
        fast()
    elif inside == "false":
        clipped()
    else:
        cx.f.branch(inside, fast, clipped)


# ---- copy, fill, transpose, atomic --------------------------------------------------------------------------------


def print_tile_loops(cx: Code, s: TileLoops) -> None:
    """Print the loop nest of a tile operation."""
    op = s.op
    dst = Side(op.dst.buffer, mins_of(cx, op.dst), s.dst)  # type: ignore[attr-defined]
    if isinstance(op, Fill):
        _fill(cx, op, s, dst)
        return
    other = op.src if isinstance(op, (Copy, Transpose)) else op.value  # type: ignore[attr-defined]
    src = None if s.src is None else Side(other.buffer, mins_of(cx, other), s.src)
    if isinstance(op, AtomicTile):
        _atomic(cx, op, s, dst, src)
    else:
        assert isinstance(op, (Copy, Transpose)) and src is not None, "the plan of a copy has two sides"
        _copy(cx, op, s, dst, src)


def _copy(cx: Code, op: Copy | Transpose, s: TileLoops, dst: Side, src: Side) -> None:
    """Print dst = cast(src). Elements outside the source's shape are its safe value; elements outside dst's shape are skipped.
    """
    f = cx.f
    sizes = [cx.index(e) for e in s.extents]
    to, frm = clip(cx, dst, sizes), clip(cx, src, sizes)
    sd, dd = src.buffer.dtype, dst.buffer.dtype

    def move(at: list[str]) -> None:
        v = load(f, sd, src.address(cx, at), op.span)
        store(f, dd, convert(f, v, sd, dd), dst.address(cx, at), op.span)

    def clipped() -> None:
        last = len(sizes) - 1

        def put(at: list[str]) -> None:
            safe = convert(f, cx.safe_value(src.buffer, sd), sd, dd)
            store(f, dd, safe, dst.address(cx, at), op.span)

        def level(k: int, at: list[str], ok: str) -> None:
            start, stop = to.low.get(k, "0"), to.high.get(k, sizes[k])
            if k < last:
                with f.loop(start, stop, hint="v") as i:
                    here = ok
                    if k in frm.low:
                        above = f.let(f"icmp sge i64 {i}, {frm.low[k]}")
                        here = f.both(f.both(ok, above), f.less(i, frm.high[k]))
                    level(k + 1, [*at, i], here)
                return
            # Innermost: fill up to a, copy a .. b, fill from b.
            a = f.smin(f.smax(frm.low.get(k, "0"), start), stop) if k in frm.low else start
            b = f.smax(f.smin(frm.high[k], stop), a) if k in frm.high else stop
            if ok != "true":
                a = f.let(f"select i1 {ok}, i64 {a}, i64 {stop}")
                b = f.let(f"select i1 {ok}, i64 {b}, i64 {stop}")
            for low, high, act in ((start, a, put), (a, b, move), (b, stop, put)):
                if low != high:
                    with f.loop(low, high, hint="v") as i:
                        act([*at, i])

        if not sizes:
            f.branch(to.ok, lambda: f.branch(frm.ok, lambda: move([]), lambda: put([])))
        else:
            f.branch(to.ok, lambda: level(0, [], frm.ok))

    _versions(cx, f.both(to.inside, frm.inside), lambda: nest(cx, sizes, {}, {}, move), clipped)


def _fill(cx: Code, op: Fill, s: TileLoops, dst: Side) -> None:
    """Print dst = value."""
    sizes = [cx.index(e) for e in s.extents]
    to = clip(cx, dst, sizes)
    dd = dst.buffer.dtype
    value = cx.cast_value(op.value, dd)

    def put(at: list[str]) -> None:
        store(cx.f, dd, value, dst.address(cx, at), op.span)

    _versions(cx, to.inside, lambda: nest(cx, sizes, {}, {}, put),
              lambda: cx.f.branch(to.ok, lambda: nest(cx, sizes, to.low, to.high, put)))


def _atomic(cx: Code, op: AtomicTile, s: TileLoops, dst: Side, src: Side | None) -> None:
    """Print dst = kind(dst, value), each element once."""
    f = cx.f
    sizes = [cx.index(e) for e in s.extents]
    to = clip(cx, dst, sizes)
    dd = dst.buffer.dtype
    scalar = "" if isinstance(op.value, Region) else cx.cast_value(op.value, dd)
    frm = None if src is None else clip(cx, src, sizes)

    def update(at: list[str]) -> None:
        v = scalar
        if src is not None and frm is not None:
            side, sd, there = src, src.buffer.dtype, frm.ok
            for k in frm.low:  # outside the source's shape its safe value is used, as by a copy
                there = f.both(there, f.let(f"icmp sge i64 {at[k]}, {frm.low[k]}"))
                there = f.both(there, f.less(at[k], frm.high[k]))
            v = f.choose(there, value_type(sd), lambda: load(f, sd, side.address(cx, at), op.span),
                         lambda: cx.safe_value(side.buffer, sd))
            v = convert(f, v, sd, dd)
        atomic_update(f, op.kind, dst.address(cx, at), v, dd, shared=dst.buffer.scope() != GLOBAL, span=op.span)

    _versions(cx, to.inside, lambda: nest(cx, sizes, {}, {}, update),
              lambda: f.branch(to.ok, lambda: nest(cx, sizes, to.low, to.high, update)))
