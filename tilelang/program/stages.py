"""Text of the stages of a kernel: reductions of tiles, GEMMs and their operands, scans and sorts."""

from __future__ import annotations

from collections.abc import Sequence

from .expr import Axis, Scalar, Tensor, conjuncts, read, rewrite, walk
from .nest import REDUCTIONS, Contraction
from .divide import are_halves
from .plan import exactness
from .rescale import is_float, neutral, vanishes
from .sorts import order_of
from .text import wide
from .writer import Tile, Writer

SCANS = {"scan sum": "cumsum", "scan max": "cummax", "scan min": "cummin", "scan prod": "cumprod"}
REDUCE = {"sum": "reduce_sum", "max": "reduce_max", "min": "reduce_min", "prod": "reduce_prod", "argmax": "reduce_argmax",
          "argmin": "reduce_argmin"}
COMBINE = {"sum": "{} + {}", "max": "T.max({}, {})", "min": "T.min({}, {})", "prod": "{} * {}"}
NAMES = {"sum": "total", "max": "top", "min": "least", "prod": "multiplied", "argmax": "place", "argmin": "place"}


def whole_stage(w: Writer, t: Tensor) -> None:
    """A stage whose reduced axes lie in tiles."""
    c = w.factors_of(t)
    axes = w.order(t.axes)
    if c is not None:
        acc = w.new_tile("acc", axes, t.dtype)
        gemm(w, t, c, acc, clear=True)
    elif t.kind in REDUCTIONS:
        acc = reduce(w, t, axes)
    else:
        acc = special(w, t, axes)
    w.tiles[read(t)] = acc
    w.inside = w.inside | {acc.name}


def reduce(w: Writer, t: Tensor, axes: tuple[Axis, ...], into: Tile | None = None) -> Tile:
    """T.reduce_* of the tile of a body, along one axis after another."""
    over = [a for a in t.over if w.plan.uses[a].kind in ("whole", "loop")]
    body = w.body(t)
    dims = with_reduced(w, axes, over, body)
    source = w.root(body, "x", dims)
    if into is not None and tuple(a for a in source.axes if a not in over) != into.axes:  # it lies in another order
        moved = w.new_tile("x", dims, source.dtype)
        outside = w.before is not None and not w.changes(body)
        w.parallel(dims, f"{w.element_of(moved)} = {w.element_of(source)}", outside=outside)
        source = moved
    dims = source.axes
    if not over:
        return combine(w, t, source, into)
    fresh = into is None or into.name.startswith("part")
    outside = w.before is not None and into is None and not w.changes(body)
    for k, a in enumerate(reversed(over)):
        left = tuple(x for x in dims if x is not a)
        last = k == len(over) - 1
        acc = into if into is not None and last else w.new_tile(NAMES[t.kind], left, t.dtype)
        dim = dims.index(a) + w.dummy
        clear = "" if fresh or not last else ", clear=False"
        w.say(f"T.{REDUCE[t.kind]}({w.name_of(source)}, {w.name_of(acc)}, dim={dim}{clear})", outside)
        source, dims = acc, left
    return source


def combine(w: Writer, t: Tensor, source: Tile, into: Tile | None) -> Tile:
    """One index of the reduced axes: the elements themselves."""
    if into is None:
        return source
    new, old = w.element_of(source), w.element_of(into)
    w.parallel(into.axes, f"{old} = {COMBINE[t.kind].format(old, new)}")
    return into


def accumulate(w: Writer, t: Tensor, acc: Tile) -> None:
    """One index of the reduced axes: each thread combines its elements with those of memory.

    What several elements have in common is computed once, and elements that do not count are passed over: loads without
    conditions are wide.
    """
    body = w.body(t)
    condition = next((x.args[0] for x in walk(body) if x.op == "where" and vanishes(t.kind, body, x.args[0])), None)
    tests = [] if condition is None else conjuncts(condition)
    outside = [x for x in tests if not x.axes & set(acc.axes[-1:])]
    if condition is not None:
        inside = [x for x in tests if x not in outside]
        body = rewrite(body, lambda x: _chosen(x, inside) if x.op == "where" and x.args[0] == condition else None)
    _common(w, body, acc)
    w.ready(body)
    old, pad = w.element_of(acc), "    " * bool(outside)
    text = COMBINE[t.kind].format(old, w.printer().text(body, 7 if t.kind in ("sum", "prod") else -1))
    head = [f"if {' and '.join(w.printer().text(x, 2) for x in outside)}:"] if outside else []
    w.parallel(acc.axes, *head, f"{pad}{old} = {text}")


def _chosen(x: Scalar, tests: list[Scalar]) -> Scalar:
    """A selection by some of the tests of its condition only."""
    if not tests:
        return x.args[1]
    condition = tests[0]
    for y in tests[1:]:
        condition = Scalar("and", (condition, y), "bool")
    return Scalar("where", (condition, *x.args[1:]), x.dtype)


def _common(w: Writer, e: Scalar, acc: Tile) -> None:
    """Names and tiles for what is common to the elements of an accumulator, or to those along some of its axes."""
    if e in w.tiles or e in w.scalars or not e.reads or e.dtype == "bool":
        return
    axes = w.plan.tiled(tuple(e.axes))
    if not axes and e not in w.scalars:
        name = w.unused("factor")
        w.say(f"{name} = {w.printer().text(e)}", not w.changes(e))
        w.scalars[e] = name
    elif set(axes) < set(acc.axes) and is_float(e.dtype):
        w.root(e, "x")
    else:
        for x in e.args if e.op != "read" else ():
            _common(w, x, acc)


def with_reduced(w: Writer, axes: tuple[Axis, ...], over: Sequence[Axis], body: Scalar) -> tuple[Axis, ...]:
    """The axes of the tile that is reduced: a single reduced axis stands where the widest read has it, else last."""
    if len(over) == 1:
        wide_read = max((r for r in body.reads if over[0] in r.axes), key=lambda r: (len(r.axes), repr(r)), default=None)
        if wide_read in w.tiles and len(w.tiles[wide_read].axes) == len(axes) + 1:
            return w.tiles[wide_read].axes
        if wide_read is not None and wide_read.value not in w.stages:
            order = [a for i in wide_read.args for a in sorted(i.axes, key=lambda a: a.name)]
            later = [k for k, a in enumerate(axes) if a in order and order.index(a) > order.index(over[0])]
            if later:
                return (*axes[:later[0]], over[0], *axes[later[0]:])
    return (*axes, *over)


def gemm(w: Writer, t: Tensor, c: Contraction, acc: Tile, clear: bool = False) -> None:
    """T.gemm of two operands into an accumulator."""
    (over,), (m,), (n,) = w.plan.tiled(t.over), w.plan.tiled(c.m), w.plan.tiled(c.n)
    left, right = c.a, c.b
    if acc.axes == (n, m):  # the accumulator lies transposed
        left, right, m, n = right, left, n, m
    kind = left.dtype if left.dtype == right.dtype else "float64" if "float64" in (left.dtype, right.dtype) else "float32"
    exact = exactness(kind, w.target)
    registers = not (exact or w.plan.shared_left)
    if exact == "halves":  # neighbours in memory are rows: threads load what they multiply
        registers = all(r.value not in w.stages and r.args and m in r.args[-1].axes for r in left.reads)
    a, flip_a = operand(w, left, (m, over), over, kind, registers)
    if not are_halves(right):
        b, flip_b = operand(w, right, (over, n), over, kind, False)
    if exact == "threads":
        multiply_exactly(w, a, b, acc, over, clear)
        return
    if exact == "halves":
        lefts = tf32_halves(w, a, (m, over), not w.changes(left))
        rights = [operand(w, x, (n, over), over, kind, False)[0] for x in right.args] if are_halves(right) else (
            tf32_halves(w, b, (n, over), not w.changes(right), "shared"))
        flags = ", transpose_B=True"  # tensor cores read float32 with the terms of a sum side by side
        looped = w.current is not None and over in w.current.axes
        into = w.new_tile(f"part_{acc.name}", acc.axes, acc.dtype) if looped else acc
        for k, (x, y) in enumerate(((1, 0), (0, 1), (0, 0))):
            start = ", clear_accum=True" if (clear or looped) and not k else ""
            w.say(f"T.gemm({w.name_of(lefts[x])}, {w.name_of(rights[y])}, {w.name_of(into)}{flags}{start})")
        if looped:  # tensor cores cut each sum: one over a long loop would lose bits
            w.parallel(acc.axes, f"{w.element_of(acc)} += {w.element_of(into)}")
        return
    flags = ", transpose_A=True" * flip_a + ", transpose_B=True" * flip_b + ", clear_accum=True" * clear
    w.say(f"T.gemm({w.name_of(a)}, {w.name_of(b)}, {w.name_of(acc)}{flags})")


def multiply_exactly(w: Writer, a: Tile, b: Tile, acc: Tile, over: Axis, clear: bool) -> None:
    """A GEMM by multiply-adds of threads: T.gemm would round float32 to tf32, and has no integers of more than 8 bits."""
    if clear:
        w.say(f"T.clear({acc.name})")
    why = "T.gemm would round the factors to tf32" if is_float(a.dtype) else f"T.gemm has no factors of {a.dtype}"
    w.say(f"for {over.name} in T.serial({w.size(over)}):  # {why}")
    w.depth += 1
    x, y = (w.element_of(f) if is_float(f.dtype) or f.dtype == acc.dtype else f'T.cast({w.element_of(f)}, "{acc.dtype}")'
            for f in (a, b))
    w.parallel(acc.axes, f"{w.element_of(acc)} += {x} * {y}")
    w.depth -= 1


def tf32_halves(w: Writer, tile: Tile, axes: tuple[Axis, ...], outside: bool, scope: str = "") -> tuple[Tile, Tile]:
    """A float32 tile as the sum of two tiles of tf32 numbers, but for 2**-21 of an element."""
    scope = scope or ("shared" if w.dummy else "fragment")
    key = (tile.key, axes, scope)
    if key not in w.halves:
        high, low = (w.new_tile(f"{tile.name.removesuffix('_s')}_{x}", axes, tile.dtype, scope) for x in ("high", "low"))
        one, x, y = map(w.element_of, (tile, high, low))
        cut, bits = w.cut_name, f'T.reinterpret({one}, "int32") + 4096'
        w.parallel(axes, f'{cut} = T.reinterpret(({bits}) & -8192, "float32")  # 10 bits, as tf32', f"{x} = {cut}",
                   f'{y} = T.reinterpret(T.reinterpret({one} - {cut}, "int32") & -8192, "float32")', outside=outside)
        w.halves[key] = high, low
    return w.halves[key]


def operand(w: Writer, e: Scalar, pair: tuple[Axis, Axis], over: Axis, dtype: str, left: bool) -> tuple[Tile, bool]:
    """(tile, whether it lies transposed): an operand of T.gemm, copied to shared memory or computed in registers.

    pair: its axes, rows first.  over: the one of them that is summed over.
    """
    first, second = pair
    source = e.args[0] if e.op == "cast" and e.args[0].dtype == e.dtype else e
    for axes in ((first, second), (second, first)):
        key = (source, axes, dtype)
        if key in w.shared:
            return w.shared[key], axes[0] is second
        if source.dtype == dtype and w.ends_with(source, over) and (tile := w.copied(source, axes, not w.changes(source))):
            w.shared[key] = tile
            return tile, axes[0] is second
    free = second if over is first else first
    last = {a for r in source.reads if r.value in w.names and r.args for a in r.args[-1].axes}
    axes = (second, first) if not left and over is first and over in last and free not in last else (first, second)
    key = (source, axes, dtype)
    if key not in w.shared:
        w.shared[key] = computed_operand(w, source, axes, dtype, left)
    return w.shared[key], axes[0] is second


def computed_operand(w: Writer, e: Scalar, axes: tuple[Axis, ...], dtype: str, left: bool) -> Tile:
    """An operand that is computed: in registers on the left, in shared memory on the right."""
    condition = w.within(a for a in axes if w.plan.uses[a].kind in ("loop", "whole"))
    body = e
    if condition is not None and not vanishes("sum", e, condition):
        inner = e.args[0] if e.op == "cast" and e.dtype == dtype else e  # the tile rounds
        body = Scalar("where", (condition, inner, neutral("sum", wide(e.dtype))), wide(e.dtype))
    if body.dtype != dtype or body.op != "cast" and is_float(dtype) and wide(dtype) != dtype:
        body = Scalar("cast", (body,), dtype)
    direct = left and dtype == "float32" and w.target.is_gpu  # its halves are in registers too
    for r in () if direct else sorted(e.reads, key=repr):  # what the loop loads comes through shared memory: it is pipelined
        if w.current is not None and not w.dummy and r not in w.shared and len(w.order(r.axes)) == 2 and w.changes(r):
            if tile := w.copied(r, axes, divided=True) or w.copied(r, axes[::-1], divided=True):
                w.shared[r] = tile
    if left and not w.dummy:
        return w.root(body, "left", axes, dtype)
    w.ready(body)
    tile = w.new_tile("right" if not left else "left", axes, dtype, "shared")
    w.parallel(axes, f"{w.element_of(tile)} = {stored_text(w, body, dtype)}", outside=not w.changes(e))
    return tile


def stored_text(w: Writer, e: Scalar, dtype: str) -> str:
    """An expression in the type of the tile that it is stored in."""
    inner = e.args[0] if e.op == "cast" and e.dtype == dtype and wide(dtype) != dtype and e not in w.tiles else e
    if inner is e:
        return w.printer().text(e)
    if inner.op == "where" and inner.args[2].op == "const":
        plain = inner.args[1].args[0] if inner.args[1].op == "cast" else inner.args[1]
        if plain.op == "read" and plain.dtype == dtype and plain.value in w.names:  # a copy without conversions
            other = f'T.cast({w.printer().text(inner.args[2])}, "{dtype}")'
            return f"T.if_then_else({w.printer().text(inner.args[0])}, {w.place_text(plain)}, {other})"
    return f'T.cast({w.printer().text(inner)}, "{dtype}")'


def special(w: Writer, t: Tensor, axes: tuple[Axis, ...]) -> Tile:
    """A scan or a sort along an axis that lies in the tile as a whole."""
    assert t.body is not None
    (along,) = t.over
    if t.kind.startswith("scan"):
        source = w.root(w.body(t), "x", axes)
        out = w.new_tile("scan", axes, t.dtype)
        dim, reverse = axes.index(along) + w.dummy, ", reverse=True" * t.attrs["reverse"]
        w.say(f"T.{SCANS[t.kind]}({w.name_of(source)}, {out.name}, dim={dim}{reverse})")
        if w.plan.uses[along].kind == "loop":  # tile by tile: what came before is carried
            kind, left = t.kind.removeprefix("scan "), tuple(a for a in axes if a is not along)
            carried, part = (w.new_tile(n, left, t.dtype) for n in ("carried", "part"))
            w.say(f"T.fill({carried.name}, {w.printer().text(neutral(t.kind, wide(t.dtype)))})", True)
            w.say(f"T.{REDUCE[kind]}({w.name_of(source)}, {part.name}, dim={dim})")
            one, before, more = map(w.element_of, (out, carried, part))
            w.parallel(axes, f"{one} = {COMBINE[kind].format(before, one)}")
            w.parallel(left, f"{before} = {COMBINE[kind].format(before, more)}")
        return out
    place = max((a for a in axes if a not in t.body.axes), key=w.size)  # others have one index
    return order_of(w, t, tuple(a for a in axes if a is not place), along, place)
