"""Copies from global to shared memory by lanes that fill the run of bytes of their wave in order."""

from __future__ import annotations

from math import prod
from typing import Any

from tilelang.ir import (AddressOf, Bind, Evaluate, Expr, For, If, Stmt, binary, call, const, convert, fresh, replace, seq)

from .pairing import iteration_space, matched_indices


def lower_by_lanes(op: Any, cx: Any) -> Stmt:
    """The asynchronous copies of one lane, of zeros where the source is out of range.

    Lane i of all threads writes chunk i of the tile's storage, and reads what the layout, which is its own inverse, puts there.
    """
    known, threads, count = cx.known, cx.num_threads, op.plan.lanes // op.dst.dtype.bytes
    extents, of_dst, of_src = iteration_space(op.dst, op.src)
    chunks = prod(extents) // count
    steps = -(-chunks // threads)
    r, chunk, saved = fresh("r"), fresh("chunk"), known.analyzer
    known.analyzer = saved.bind(r, 0, steps - 1).bind(chunk, 0, chunks - 1)
    start = tuple(convert(m) for m in op.dst.mins)
    tile = replace(op.dst, mins=tuple(const(0) if d is None else m for m, d in zip(start, of_dst)))
    there = cx.layout_of(op.dst.buffer).offset(matched_indices(tile, of_dst, _unflattened(chunk * count, extents)))
    binds: list[Stmt] = []
    at: list[Expr] = []
    for d, i in enumerate(_unflattened(there, extents)):
        v, step = fresh("ijkl"[d]), count if d == len(extents) - 1 else 1
        binds.append(Bind(v, known.analyzer.simplify(i)))
        known.analyzer, known.divisors[v] = known.analyzer.bind(v, 0, extents[d] - step), step
        at.append(v)
    source = matched_indices(op.src, of_src, tuple(at))
    guard = cx.guard(op.src.buffer, source, width=count)
    storage, (begin,) = cx.physical(op.dst.buffer, tuple(map(cx.expr, start)))
    args = [AddressOf(storage, (begin + chunk * count,)), cx.expr(AddressOf(op.src.buffer, source))]
    known.analyzer = saved
    args += [] if guard is None else [guard]
    inner = seq(*binds, Evaluate(call("cp_async", tuple(args), "void", span=op.span, bytes=op.plan.lanes), span=op.span))
    inner = If(binary("lt", chunk, const(chunks)), inner) if chunks % threads else inner
    return For(r, const(0), const(steps), "unroll", seq(Bind(chunk, r * threads + cx.thread), inner), span=op.span)


def _unflattened(flat: Expr, extents: tuple[int, ...]) -> tuple[Expr, ...]:
    """The indices in a tile of these extents of an element, by its number."""
    out: list[Expr] = []
    for n in reversed(extents[1:]):
        out, flat = [binary("floormod", flat, const(n)), *out], binary("floordiv", flat, const(n))
    return (flat, *out)
