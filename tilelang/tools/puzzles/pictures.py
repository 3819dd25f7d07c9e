"""A picture of what one block of a kernel does: its buffers by memory, the tiles that it touches, and its steps as arrows.

The tile of a tensor is drawn for the block in the middle of the grid, in the first iteration of each loop.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np

from tilelang.ir import (FRAGMENT, GLOBAL, SHARED, Alloc, Buffer, Const, Evaluate, For, Func, If, Launch, Parallel, Seq, Stmt,
                         Store, TileOp, Var, inner, walk)
from tilelang.ir.evaluate import evaluate
from tilelang.errors import TileLangError
from tilelang.ir.record import record
from tilelang.transform.analysis.effects import Effect, effects

_BANDS = (("global memory", "#dbeafe"), ("shared memory", "#dcfce7"), ("registers", "#fef3c7"))
Place = tuple[float, float, float, float]  # of a box: left, top, width, height
_SHORT = {"float16": "f16", "float32": "f32", "bfloat16": "bf16", "int32": "i32", "uint8": "u8"}
_WIDTH, _BAND, _BOX = 640, 180, 84


@record
class Step:
    """One statement of a block.  depth: loops around it.  code: its source line.  reads, writes: buffer -> tile, if known."""

    depth: int
    code: str
    reads: dict[Buffer, Any]
    writes: dict[Buffer, Any]


def steps_of(func: Func) -> list[Step]:
    """The tile operations and parallel loops of the first launch, in order."""
    launch = next((n for n in walk(func.body) if isinstance(n, Launch)), None)
    if launch is None:
        return []
    return list(_steps(launch.body, {v: (_number(g) or 1) // 2 for v, g in zip(launch.block_vars, launch.grid)}, 0))


def _steps(s: Stmt, values: dict[Var, Any], depth: int) -> Iterator[Step]:
    if isinstance(s, For):
        values = {**values, s.var: _number(s.start) or 0}
    if isinstance(s, (TileOp, Parallel, Store, Evaluate)):
        touched = [e for e in effects(s) if e.buffer.scope() in (GLOBAL, FRAGMENT, *SHARED)]
        tiles = [(e, _tile(e, s, values)) for e in touched]
        if touched:
            yield Step(depth, _code(s), {e.buffer: t for e, t in tiles if e.reads}, {e.buffer: t for e, t in tiles if e.writes})
        return
    for child in (s.stmts if isinstance(s, Seq) else inner(s)):
        yield from _steps(child, values, depth + isinstance(s, (For, If)))


def _code(s: Stmt) -> str:
    """The source line of a statement; of a loop of one statement, that one."""
    inside = list(inner(s)) if isinstance(s, Parallel) else []
    at = inside[0] if len(inside) == 1 and inside[0].span is not None else s
    return linecache.getline(at.span.file, at.span.line).strip() if at.span is not None else type(s).__name__


def _number(e: Any) -> int | None:
    return int(e.value) if isinstance(e, Const) else e if isinstance(e, int) else None


def _tile(e: Effect, s: Stmt, values: dict[Var, Any]) -> tuple[tuple[float, float], ...] | None:
    """The part of a buffer that a step touches, as (begin, end), each from 0 to 1, for each dimension; None if unknown."""
    spans = []
    loops = {v: np.array([0, (_number(n) or 1) - 1]) for v, n in zip(s.vars, s.extents)} if isinstance(s, Parallel) else {}
    corners = {v: x for v, x in zip(loops, np.meshgrid(*loops.values(), indexing="ij"))} if loops else {}
    try:
        for d, size in enumerate(e.buffer.shape):
            if e.region is not None:
                low = int(evaluate(e.region.mins[d], values))
                high = low + (_number(e.region.extents[d]) or 1)
            else:
                at = np.asarray(evaluate((e.indices or ())[d], {**values, **corners}))
                low, high = int(at.min()), int(at.max()) + 1
            extent = _number(size) or 1
            spans.append((min(max(low / extent, 0.0), 1.0), min(max(high / extent, 0.0), 1.0)))
    except (TileLangError, IndexError, KeyError):  # an index that depends on data
        return None
    return tuple(spans)


def picture(program: Any) -> str:
    """An SVG picture of a program, a PrimFunc or a Func.  See the head of this file."""
    func: Func = getattr(program, "func", program)
    steps = steps_of(func)
    buffers = [b for _, b in func.buffers] + [n.buffer for n in walk(func.body, Alloc)]
    places: dict[Buffer, Place] = {}
    out: list[str] = []
    for band, (title, colour) in enumerate(_BANDS):
        mine = [b for b in buffers if _band(b) == band]
        out.append(f'<rect x="0" y="{band * _BAND}" width="{_WIDTH}" height="{_BAND - 4}" fill="{colour}"/>'
                   f'<text x="6" y="{band * _BAND + 15}" class="t">{title}</text>')
        for k, b in enumerate(mine):
            places[b] = _place(b, (k + 0.5) * _WIDTH / len(mine), band * _BAND + _BAND / 2 - 4, min(1.0, 5 / len(mine)))
    for b, box in places.items():
        tile = next((t for s in steps for x in (s.reads, s.writes) for o, t in x.items() if o is b and t), None)
        out.append(_box(b, box, tile if _band(b) == 0 else None))
    for k, s in enumerate(steps):
        out += _arrows(k + 1, s, places)
    lines = [f'<text x="{_WIDTH + 14 + 14 * s.depth}" y="{24 + 20 * k}" class="c"><tspan class="n">{k + 1}</tspan> '
             f"{escape(s.code[:74])}</text>" for k, s in enumerate(steps)]
    height = max(3 * _BAND, 34 + 20 * len(steps))
    style = (".t,.c,.n{font:12px sans-serif;fill:#334155}.s{font:10px sans-serif;fill:#64748b}.c{font:12px monospace}"
             ".n{font-weight:bold;fill:#b91c1c}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1260 {height}" width="1260"><style>{style}</style>'
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="#64748b"/></marker></defs>'
            f'<rect width="1260" height="{height}" fill="white"/>{"".join(out)}{"".join(lines)}</svg>')


def _band(b: Buffer) -> int:
    return 0 if b.scope() == GLOBAL else 1 if b.scope() in SHARED else 2


def _place(b: Buffer, x: float, y: float, scale: float) -> Place:
    """(left, top, width, height) of a buffer's box; its sides show rows and columns, the smaller one not too thin."""
    shape = [_number(d) or 1 for d in b.shape]
    rows, columns = int(np.prod(shape[:-1])) if len(shape) > 1 else 1, shape[-1] if shape else 1
    most = max(rows, columns)
    w, h = max(20.0, _BOX * scale * columns / most), max(18.0, _BOX * rows / most)
    return x - w / 2, y - h / 2, w, h


def _box(b: Buffer, box: Place, tile: Any) -> str:
    x, y, w, h = box
    out = f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="white" stroke="#475569"/>'
    if tile:
        (r0, r1), (c0, c1) = tile[-2] if len(tile) > 1 else (0, 1), tile[-1]
        out += (f'<rect x="{x + c0 * w:.1f}" y="{y + r0 * h:.1f}" width="{max(2, (c1 - c0) * w):.1f}" '
                f'height="{max(2, (r1 - r0) * h):.1f}" fill="#f97316" fill-opacity="0.6"/>')
    size = "x".join(str(_number(d) or "?") for d in b.shape)
    middle = f'x="{x + w / 2:.1f}" text-anchor="middle"'
    return out + (f'<text {middle} y="{y + h + 13:.1f}" class="t">{escape(b.name)}</text>'
                  f'<text {middle} y="{y + h + 26:.1f}" class="s">{size} {_SHORT.get(str(b.dtype), b.dtype)}</text>')


def _arrows(number: int, s: Step, places: dict[Buffer, Place]) -> Iterator[str]:
    """An arrow from each buffer that a step reads to each one that it writes, and the step's number."""
    for to in s.writes:
        sources = [b for b in s.reads if b is not to and b in places] if to in places else []
        for source in sources:
            path, x, y = _path(number, places[source], places[to])
            yield (f'<path d="{path}" fill="none" stroke="#64748b" marker-end="url(#a)"/>'
                   f'<text x="{x:.1f}" y="{y:.1f}" class="n">{number}</text>')
        if to in places and not sources:  # computed from itself, or from nothing
            x, y, w, h = places[to]
            yield f'<text x="{x + w + 3:.1f}" y="{y + 12 + 13 * (number % 4):.1f}" class="n">{number}</text>'


def _path(number: int, source: Place, to: Place) -> tuple[str, float, float]:
    """(an arrow from box to box, where its number stands).  In one memory it goes over the boxes or under them."""
    (x0, y0, w0, h0), (x1, y1, w1, h1) = source, to
    a, b = x0 + w0 / 2, x1 + w1 / 2
    if abs(y0 + h0 / 2 - y1 - h1 / 2) < _BAND / 2:
        over = number % 2 == 1
        ya, yb = (y0, y1) if over else (y0 + h0, y1 + h1)
        high = (min(ya, yb) - 12 - abs(b - a) / 14) if over else (max(ya, yb) + 12 + abs(b - a) / 14)
        return f"M{a:.1f},{ya:.1f} Q{(a + b) / 2:.1f},{high:.1f} {b:.1f},{yb:.1f}", (a + 2 * b) / 3, high + (6 if over else 0)
    ya, yb = (y0 + h0, y1) if y1 > y0 else (y0, y1 + h1)
    return f"M{a:.1f},{ya:.1f} L{b:.1f},{yb:.1f}", (a + 2 * b) / 3 + 4, (ya + 2 * yb) / 3

