"""Tile operations as loop nests: copy, fill, transpose, atomic.

A nest over a region of a global buffer is emitted twice when it cannot be proven in range: once with constant bounds,
taken when the whole region is inside, and once with the bounds clipped per dimension (edge tiles).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilelang.ir import Buffer, Const, Region
from tilelang.ops import AtomicTile, Copy, Fill, Transpose
from tilelang.target.cpu import unsupported

from .atomics import atomic_update
from .state import Code
from .text import is_literal
from .types import convert, load, store, value_type


@dataclass
class Side:
    """One operand of a tile op: its buffer, the region's start (i64 per dimension), and dimension -> loop number."""

    buffer: Buffer
    mins: list[str]
    loop_of: dict[int, int]

    def indices(self, cx: Code, at: list[str]) -> list[str]:
        """Element indices at loop counters `at`."""
        return [cx.f.add(at[self.loop_of[d]], m) if d in self.loop_of else m for d, m in enumerate(self.mins)]

    def address(self, cx: Code, at: list[str]) -> str:
        return cx.address(self.buffer, self.indices(cx, at))


def _non_unit(r: Region) -> list[int]:
    return [d for d, e in enumerate(r.extents) if not (isinstance(e, int) and e == 1)]


def mins_of(cx: Code, r: Region) -> list[str]:
    """Start of a region, i64 per dimension."""
    return [cx.index(m) for m in r.mins]


def sides(cx: Code, base: Region, other: Region | None, span: Any) -> tuple[list[Any], Side, Side | None]:
    """Loop extents (those of `base`), and both sides; non-unit dimensions are matched in order."""
    dims = _non_unit(base)
    a = Side(base.buffer, mins_of(cx, base), {d: k for k, d in enumerate(dims)})
    extents = [base.extents[d] for d in dims]
    if other is None:
        return extents, a, None
    theirs = _non_unit(other)
    if len(theirs) != len(dims) and len(base.extents) == len(other.extents):
        theirs = dims  # same rank: a run-time extent may stand opposite a 1
    if len(theirs) != len(dims):
        raise unsupported(f"regions of {len(theirs)} and {len(dims)} non-unit dimensions in one tile operation",
                          span=span, hint="give both operands the same number of dimensions larger than 1")
    return extents, a, Side(other.buffer, mins_of(cx, other), {d: k for k, d in enumerate(theirs)})


def _edges(cx: Code, side: Side, region: Region, extents: list[Any]) -> tuple[dict[int, int], list[int]]:
    """Dimensions of a side that need a guard: {loop number: dimension} and fixed dimensions."""
    loops: dict[int, int] = {}
    fixed: list[int] = []
    if side.buffer.scope() != "global" or not cx.guarded:
        return loops, fixed
    for d, size in enumerate(side.buffer.shape):
        k = side.loop_of.get(d)
        if k is None:
            if not cx.memory.proven(region.mins[d], size):
                fixed.append(d)
            continue
        e = extents[k]
        m = region.mins[d]
        whole = isinstance(e, int) and e > 0 and cx.memory.proven(m, size) and cx.memory.proven(m + (e - 1), size)
        if not whole:
            loops[k] = d
    return loops, fixed


@dataclass
class Clip:
    """Guards of one side, evaluated before the nest.

    low, high: per loop the counters inside the buffer (only for loops that need it).  ok: i1, the fixed dimensions are
    inside.  inside: i1, the whole region is.
    """

    low: dict[int, str]
    high: dict[int, str]
    ok: str
    inside: str

    @property
    def needed(self) -> bool:
        return self.inside != "true"


def clip(cx: Code, side: Side, region: Region, extents: list[Any], sizes: list[str]) -> Clip:
    """Guards of one side of a tile operation; sizes: loop extents as i64."""
    f = cx.f
    loops, fixed = _edges(cx, side, region, extents)
    out = Clip({}, {}, "true", "true")
    for d in fixed:
        out.ok = f.both(out.ok, f.let(f"icmp ult i64 {side.mins[d]}, {cx.index(side.buffer.shape[d])}"))
    out.inside = out.ok
    for k, d in loops.items():
        low = f.smax(f.sub("0", side.mins[d]), "0")
        high = f.smin(f.sub(cx.index(side.buffer.shape[d]), side.mins[d]), sizes[k])
        out.low[k], out.high[k] = low, high
        if is_literal(sizes[k]):
            whole = f.both(f.let(f"icmp eq i64 {low}, 0"), f.let(f"icmp eq i64 {high}, {sizes[k]}"))
            out.inside = f.both(out.inside, whole)
        else:
            out.inside = "false"  # the clipped nest is as good when the extent is not constant anyway
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


def emit_copy(cx: Code, op: Copy) -> None:
    """dst = cast(src): rows past the source's shape get its safe value, elements past dst's are skipped."""
    extents, dst, src = sides(cx, op.dst, op.src, op.span)
    assert src is not None, "sides() gives two sides for two regions"
    _copy(cx, op, extents, dst, src)


def _copy(cx: Code, op: Copy | Transpose, extents: list[Any], dst: Side, src: Side) -> None:
    f = cx.f
    sizes = [cx.index(e) for e in extents]
    to, frm = clip(cx, dst, op.dst, extents, sizes), clip(cx, src, op.src, extents, sizes)
    sd, dd = src.buffer.dtype, dst.buffer.dtype

    def move(at: list[str]) -> None:
        v = load(f, sd, src.address(cx, at), op.span)
        store(f, dd, convert(f, v, sd, dd), dst.address(cx, at), op.span)

    def clipped() -> None:
        last = len(sizes) - 1

        def put(at: list[str]) -> None:
            safe = convert(f, cx.memory.safe_value(src.buffer, sd), sd, dd)
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


def emit_transpose(cx: Code, op: Transpose) -> None:
    """dst[…, j, i] = src[…, i, j]."""
    extents, dst, src = sides(cx, op.dst, op.src, op.span)
    assert src is not None, "sides() gives two sides for two regions"
    n = len(extents)
    if not any(isinstance(e, int | Const) and int(e) == 1 for e in op.dst.extents[-2:]):  # else the order stays
        src.loop_of = {d: {n - 2: n - 1, n - 1: n - 2}.get(k, k) for d, k in src.loop_of.items()}
    _copy(cx, op, extents, dst, src)


def emit_fill(cx: Code, op: Fill) -> None:
    """dst = value."""
    extents, dst, _ = sides(cx, op.dst, None, op.span)
    sizes = [cx.index(e) for e in extents]
    to = clip(cx, dst, op.dst, extents, sizes)
    dd = dst.buffer.dtype
    value = cx.cast_value(op.value, dd)

    def put(at: list[str]) -> None:
        store(cx.f, dd, value, dst.address(cx, at), op.span)

    _versions(cx, to.inside, lambda: nest(cx, sizes, {}, {}, put),
              lambda: cx.f.branch(to.ok, lambda: nest(cx, sizes, to.low, to.high, put)))


def emit_atomic(cx: Code, op: AtomicTile) -> None:
    """dst = kind(dst, value), each element once."""
    f = cx.f
    other = op.value if isinstance(op.value, Region) else None
    extents, dst, src = sides(cx, op.dst, other, op.span)
    sizes = [cx.index(e) for e in extents]
    to = clip(cx, dst, op.dst, extents, sizes)
    dd = dst.buffer.dtype
    scalar = "" if isinstance(op.value, Region) else cx.cast_value(op.value, dd)
    frm = clip(cx, src, op.value, extents, sizes) if src is not None and isinstance(op.value, Region) else None

    def update(at: list[str]) -> None:
        v = scalar
        if src is not None and frm is not None:
            side, sd, there = src, src.buffer.dtype, frm.ok
            for k in frm.low:  # past the source's shape its safe value is taken, as by a copy
                there = f.both(there, f.let(f"icmp sge i64 {at[k]}, {frm.low[k]}"))
                there = f.both(there, f.less(at[k], frm.high[k]))
            v = f.choose(there, value_type(sd), lambda: load(f, sd, side.address(cx, at), op.span),
                         lambda: cx.memory.safe_value(side.buffer, sd))
            v = convert(f, v, sd, dd)
        atomic_update(f, op.kind, dst.address(cx, at), v, dd, shared=dst.buffer.scope() != "global", span=op.span)

    _versions(cx, to.inside, lambda: nest(cx, sizes, {}, {}, update),
              lambda: f.branch(to.ok, lambda: nest(cx, sizes, to.low, to.high, update)))


__all__ = ["emit_atomic", "emit_copy", "emit_fill", "emit_transpose", "mins_of", "nest"]
