"""Reductions and scans of tiles as loop nests; reductions over adjacent elements, and of adjacent columns, use vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import Buffer, Region, dtype
from tilelang.ops import Reduce, Scan
from tilelang.target.cpu_launch import ReduceLoops

from . import arithmetic
from .code import Code
from .tile_loops import mins_of, nest
from .text import Fn, widths
from .types import convert, intrinsic, load, rounded, store, value_type

BLOCK = 4  # vectors of columns that are accumulated side by side, to hide the latency of an addition


def _whole(cx: Code, b: Buffer, r: Region) -> tuple[Buffer, list[str], list[Any]]:
    return b, mins_of(cx, r), list(r.extents)


def emit_reduce(cx: Code, s: ReduceLoops) -> None:
    """Print dst = kind over src along dim, combined in dst's dtype."""
    f, op = cx.f, s.op
    assert isinstance(op, Reduce), "what plan_reductions plans"
    src, smin, extents = _whole(cx, op.src.buffer, op.src)
    dst, dmin, dext = _whole(cx, op.dst.buffer, op.dst)
    dim = op.dim % len(extents)
    rest = [d for d in range(len(extents)) if d != dim]
    kept = len(dext) == len(extents)  # dst keeps dim as 1 (a 1-D source gives shape (1,) as well)
    place = {d: d if kept else k for k, d in enumerate(rest)}
    dd, sd = dst.dtype, src.dtype
    sizes = [cx.index(extents[d]) for d in rest]
    outer = [k for k, d in enumerate(rest) if d < dim]

    def source(at: list[str], r: str) -> str:
        idx = list(smin)
        for k, d in enumerate(rest):
            idx[d] = f.add(at[k], idx[d])
        idx[dim] = f.add(r, idx[dim])
        return cx.address(src, idx)

    def target(at: list[str]) -> str:
        idx = list(dmin)
        for k, d in enumerate(rest):
            idx[place[d]] = f.add(at[k], idx[place[d]])
        return cx.address(dst, idx)

    def element(address: str, lanes: int = 1) -> str:
        wide, out = sd.with_lanes(lanes), dd.with_lanes(lanes)
        v = convert(f, load(f, wide, address, op.span), wide, out)
        return arithmetic.absolute(f, v, out) if op.kind in ("abssum", "absmax") else v

    count = cx.index(extents[dim])
    if len(outer) == len(rest):
        def row(at: list[str]) -> None:
            _reduce_row(cx, op, s.lanes, count, lambda r, n: element(source(at, r), n), target(at))

        nest(cx, sizes, {}, {}, row)
        return

    def block(at: list[str], j: str, width: int) -> None:
        """Neighbours in the last dimension are accumulated in a vector."""
        wide, place = dd.with_lanes(width), target([*at, j])
        acc = f.alloca(value_type(wide), align=64, hint="acc")
        start = arithmetic.identity(op.kind, wide) if op.clear else load(f, wide, place)
        f.do(f"store {value_type(wide)} {start}, ptr {acc}")
        with f.loop("0", count, hint="r") as r:
            old = f.let(f"load {value_type(wide)}, ptr {acc}")
            f.do(f"store {value_type(wide)} {_combine(f, op, old, element(source([*at, j], r), width), wide)}, ptr {acc}")
        store(f, wide, f.let(f"load {value_type(wide)}, ptr {acc}"), place)

    def neighbours(at: list[str]) -> None:
        most, total = BLOCK * s.lanes, int(sizes[-1])
        if total >= most:
            with f.loop("0", str(total // most * most), most, hint="j") as j:
                block(at, j, most)
        done = total // most * most
        for width in widths(total % most, s.lanes):
            block(at, str(done), width)
            done += width

    if s.lanes > 1:
        nest(cx, sizes[:-1], {}, {}, neighbours)
        return

    def columns(at: list[str]) -> None:  # the innermost loop runs over the kept dimensions: adjacent elements of dst
        inner = sizes[len(outer):]
        if op.clear:
            nest(cx, inner, {}, {}, lambda i: store(f, dd, arithmetic.identity(op.kind, dd), target([*at, *i])))
        with f.loop("0", count, hint="r") as r:
            def step(i: list[str]) -> None:
                old = load(f, dd, target([*at, *i]))
                store(f, dd, _combine(f, op, old, element(source([*at, *i], r)), dd), target([*at, *i]))

            nest(cx, inner, {}, {}, step)

    nest(cx, sizes[:len(outer)], {}, {}, columns)


def _combine(f: Fn, op: Reduce, a: str, b: str, dt: dtype) -> str:
    if op.nan_propagate and dt.is_float and op.kind in ("max", "absmax", "min"):
        name = "llvm.minimum" if op.kind == "min" else "llvm.maximum"
        return rounded(f, dt, intrinsic(f, name, value_type(dt), a, b))
    return arithmetic.combine(f, op.kind, a, b, dt, reassociate=True)


def _reduce_row(cx: Code, op: Reduce, lanes: int, count: str, element: Callable[[str, int], str], target: str) -> None:
    """Print one output: the lanes of a vector accumulate adjacent elements and are then combined; the rest goes one by one."""
    f, dd = cx.f, op.dst.buffer.dtype
    start = load(f, dd, target) if not op.clear else arithmetic.identity(op.kind, dd)
    acc = f.alloca(value_type(dd), hint="acc")
    f.do(f"store {value_type(dd)} {start}, ptr {acc}")
    done = "0"
    if lanes > 1:
        wide = dd.with_lanes(lanes)
        done = str(int(count) // lanes * lanes)
        vacc = f.alloca(value_type(wide), align=64, hint="vacc")
        f.do(f"store {value_type(wide)} {arithmetic.identity(op.kind, wide)}, ptr {vacc}")
        with f.loop("0", done, lanes, hint="r") as r:
            old = f.let(f"load {value_type(wide)}, ptr {vacc}")
            f.do(f"store {value_type(wide)} {_combine(f, op, old, element(r, lanes), wide)}, ptr {vacc}")
        v = f.let(f"load {value_type(wide)}, ptr {vacc}")
        one = _halve(f, op, v, wide)
        old = f.let(f"load {value_type(dd)}, ptr {acc}")
        f.do(f"store {value_type(dd)} {_combine(f, op, old, one, dd)}, ptr {acc}")
    if done != count:
        with f.loop(done, count, hint="r") as r:
            old = f.let(f"load {value_type(dd)}, ptr {acc}")
            f.do(f"store {value_type(dd)} {_combine(f, op, old, element(r, 1), dd)}, ptr {acc}")
    store(f, dd, f.let(f"load {value_type(dd)}, ptr {acc}"), target)


def _halve(f: Fn, op: Reduce, v: str, dt: dtype) -> str:
    """Combine the lanes of a vector pairwise to one."""
    n = dt.lanes
    while n > 1:
        ty, half = value_type(dt.with_lanes(n)), dt.with_lanes(n // 2)
        halves = [f.let(f"shufflevector {ty} {v}, {ty} poison, <{n // 2} x i32> <"
                       + ", ".join(f"i32 {k}" for k in range(lo, lo + n // 2)) + ">") for lo in (0, n // 2)]
        if n == 2:
            halves = [f.let(f"extractelement {ty} {v}, i64 {k}") for k in (0, 1)]
        v = _combine(f, op, halves[0], halves[1], half)
        n //= 2
    return v


def emit_scan(cx: Code, op: Scan) -> None:
    """Print an inclusive scan along dim, from the end when reverse. src and dst may be the same buffer."""
    f = cx.f
    src, smin, extents = _whole(cx, op.src.buffer, op.src)
    dst, dmin, _ = _whole(cx, op.dst.buffer, op.dst)
    dim = op.dim % len(extents)
    rest = [d for d in range(len(extents)) if d != dim]
    count = cx.index(extents[dim])
    dd, sd = dst.dtype, src.dtype
    acc = f.alloca(value_type(dd), hint="acc")

    def row(at: list[str]) -> None:
        f.do(f"store {value_type(dd)} {arithmetic.identity(op.kind, dd)}, ptr {acc}")
        with f.loop("0", count, hint="r") as r:
            where = f.sub(f.sub(count, "1"), r) if op.reverse else r
            i, o = list(smin), list(dmin)
            for k, d in enumerate(rest):
                i[d], o[d] = f.add(at[k], i[d]), f.add(at[k], o[d])
            i[dim], o[dim] = f.add(where, i[dim]), f.add(where, o[dim])
            v = convert(f, load(f, sd, cx.address(src, i), op.span), sd, dd)
            new = arithmetic.combine(f, op.kind, f.let(f"load {value_type(dd)}, ptr {acc}"), v, dd)
            f.do(f"store {value_type(dd)} {new}, ptr {acc}")
            store(f, dd, new, cx.address(dst, o), op.span)

    nest(cx, [cx.index(extents[d]) for d in rest], {}, {}, row)
