"""Text of the loops of a kernel: running reductions, and the tiles that a condition leaves out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, prod

from .expr import Axis, Scalar, Tensor, at, axis, bounds, const, linear, number, plus, read, rewrite, summed, walk
from .graph import Size
from .nest import REDUCTIONS, Pass
from .rescale import EXPONENTIALS, NEUTRAL, conditions, neutral, vanishes
from .stages import NAMES, REDUCE, accumulate, gemm, reduce, with_reduced
from .text import wide
from .writer import Tile, Writer, ceildiv, digits, tight

UNROLLED = 32  # most elements of a window of which each has code of its own
FINITE = 1e30  # stands for infinity in running extremes: the difference of two of them is a number


def write_pass(w: Writer, p: Pass) -> None:
    """A loop and what stands in front of it."""
    for t in p.stages:
        assert t.body is not None
        ensure_outer(w, t.body, p)
    running: dict[Tensor, Tile] = {}
    extremes: dict[Tensor, Tile] = {}
    moved: list[Tensor] = []
    for t in p.stages:
        axes = w.order(t.axes)
        acc = w.new_tile("acc" if w.plan.gemm_of(t) is not None else NAMES[t.kind], axes, t.dtype)
        running[t] = w.tiles[read(t)] = acc
        start = NEUTRAL[t.kind.removeprefix("arg")]
        if t.kind in ("argmax", "argmin"):
            assert t.body is not None
            extremes[t] = w.new_tile("best", axes, wide(t.body.dtype))
            w.say(f"T.fill({extremes[t].name}, {w.printer().text(neutral(t.kind, wide(t.body.dtype)))})")
            start = 0
        if start == 0:
            w.say(f"T.clear({acc.name})")
        else:
            if t in p.old and abs(start) == inf:
                moved.append(t)
            value = const(FINITE * (1 if start > 0 else -1), t.dtype) if t in moved else neutral(t.kind, wide(t.dtype))
            w.say(f"T.fill({acc.name}, {w.printer().text(value)})")
    kept, shared, tiles_inside = dict(w.tiles), dict(w.shared), w.inside
    w.inside = set()
    with iterations(w, p):
        for t in p.stages:
            if t in extremes:
                extreme_step(w, t, running[t], extremes[t])
            else:
                step(w, t, running[t], p)
        outer = {e: x for e, x in w.tiles.items() if e not in kept and not w.changes(e)}
    w.tiles = {**{e: x for e, x in kept.items() if e in w.tiles}, **outer}
    w.shared = {**shared, **{k: x for k, x in w.shared.items() if not set(x.axes) & set(p.axes)}}
    w.inside = tiles_inside
    w.done = {t for t in w.done if not set(t.axes) & set(p.axes)} | set(p.stages)
    for t in moved:
        if any(t in read_outside_exponents(e) for e in [*(s.body for s in w.stages if s not in p.stages), *(
                e for _, e in w.plan.nest.outputs)] if e is not None):
            one, sign = w.element_of(running[t]), "-" if NEUTRAL[t.kind] < 0 else ""
            none = f'{sign}T.infinity("{t.dtype}")'
            w.parallel(running[t].axes, f"{one} = T.if_then_else({one} == {sign}{FINITE!r}, {none}, {one})")


@contextmanager
def iterations(w: Writer, p: Pass) -> Iterator[None]:
    """What is written inside is one iteration of a loop; what the loop does not change goes in front of it."""
    w.current, w.before, place = p, [], len(w.lines)
    w.depth += 1
    yield
    w.depth -= 1
    w.lines[place:place] = [*w.before, *loop_head(w, p)]
    w.current, w.before = None, None


def read_outside_exponents(e: Scalar) -> set[Tensor]:
    """The tensors of which an expression reads more than their differences in exponents."""
    if e.op == "read":
        return {e.value}
    return set().union(*map(read_outside_exponents, e.args)) if e.args and e.op not in EXPONENTIALS else set()


def ensure_outer(w: Writer, e: Scalar, p: Pass) -> None:
    """Computes the stages that a loop reads and does not change."""
    for t in w.plan.nest.stages:
        if any(r.value is t for r in e.reads) and t not in p.stages:
            assert t.body is not None
            if set(t.axes) & set(p.axes) or any(r.value in p.stages for r in t.body.reads):
                ensure_outer(w, t.body, p)
            else:
                w.make(w, t)


def step(w: Writer, t: Tensor, acc: Tile, p: Pass) -> None:
    """One iteration of a reduction."""
    assert t.body is not None
    w.ensure(t.body)
    pair = w.factors_of(t)
    if pair is None:
        body = w.body(t)
        over = [a for a in t.over if w.plan.uses[a].kind in ("whole", "loop")]
        if not over and t not in p.old and t not in p.factors:
            accumulate(w, t, acc)
            return
        w.root(body, "x", with_reduced(w, acc.axes, over, body))
    if t in p.old:
        before = w.new_tile(f"{acc.name}_before", acc.axes, acc.dtype)
        w.tiles[read(p.old[t])] = before
        w.say(f"T.copy({acc.name}, {before.name})")
    if t not in p.factors:
        if pair is not None:
            gemm(w, t, pair, acc)
        else:
            reduce(w, t, acc.axes, acc)
        return
    factor = w.root(p.factors[t], "rescale")
    w.inside.add(factor.name)
    if pair is not None:
        w.parallel(acc.axes, f"{w.element_of(acc)} *= {w.element_of(factor)}")
        gemm(w, t, pair, acc)
    else:
        part = reduce(w, t, acc.axes, w.new_tile(f"part_{acc.name}", acc.axes, acc.dtype) if w.plan.tiled(t.over) else None)
        one, by = w.element_of(acc), w.element_of(factor)
        w.parallel(acc.axes, f"{one} = {one} * {by} + {w.element_of(part)}")


def extreme_step(w: Writer, t: Tensor, acc: Tile, best: Tile) -> None:
    """One iteration of the index of an extreme: that of a tile replaces the one so far where it is better."""
    (a,), body = t.over, w.body(t)
    if w.plan.tiled(t.over):
        source = w.root(body, "x", with_reduced(w, acc.axes, t.over, body))
        place, part = (w.new_tile(n, acc.axes, d) for n, d in (("place_in_tile", "int32"), ("best_of_tile", best.dtype)))
        dim = source.axes.index(a) + w.dummy
        w.say(f"T.{REDUCE[t.kind]}({w.name_of(source)}, {place.name}, dim={dim}, values={part.name})")
        found = f"{w.base_text(a)} + {w.element_of(place)}"
    else:  # one index of the axis
        part, found = w.root(body, "x", acc.axes), w.indices[a]
    new, old, at = w.element_of(part), w.element_of(best), w.element_of(acc)
    better = f"{new} {'>' if t.kind == 'argmax' else '<'} {old}"
    w.parallel(acc.axes, f"{at} = T.if_then_else({better}, {found}, {at})")
    w.parallel(acc.axes, f"{old} = T.{t.kind.removeprefix('arg')}({old}, {new})")


def loop_head(w: Writer, p: Pass) -> list[str]:
    """The `for` line of a loop: over serial axes index by index and over tiles of the last one."""
    pad, stages = "    " * w.depth, f", num_stages={w.plan.stages}" if w.plan.stages else ""
    pieces = [(a.name, str(a.extent)) for a in p.axes if w.plan.uses[a].kind == "serial"]
    tiled = [a for a in p.axes if w.plan.uses[a].kind == "loop"]
    if not pieces:
        (a,) = tiled
        scans = [t for t in w.plan.nest.stages if t.kind not in REDUCTIONS and a in t.over]
        first, last = loop_bounds(w, p, a) if not scans else ("0", ceildiv(a.extent, w.plan.uses[a].size))
        if any(t.attrs["reverse"] for t in scans):
            return [f"{pad}for {w.step_name} in T.Pipelined({last}{stages}):",
                    f"{pad}    step_{a.name} = {last} - 1 - {w.step_name}"]
        if first == "0":
            return [f"{pad}for step_{a.name} in T.Pipelined({last}{stages}):"]
        return [f"{pad}for {w.step_name} in T.Pipelined({last} - {tight(first)}{stages}):",
                f"{pad}    step_{a.name} = {first} + {w.step_name}"]
    pieces += [(f"step_{a.name}", ceildiv(a.extent, w.plan.uses[a].size)) for a in tiled]
    total = " * ".join(tight(s) for _, s in pieces)
    if not tiled and not any(map(w.plan.gemm_of, p.stages)) and all(isinstance(a.extent, int) for a in p.axes) and prod(
            a.extent for a in p.axes) <= UNROLLED:
        return [f"{pad}for {w.step_name} in T.unroll({total}):", *(f"{pad}    {x}" for x in digits(w.step_name, pieces))]
    return [f"{pad}for {w.step_name} in T.Pipelined({total}{stages}):", *(f"{pad}    {x}" for x in digits(w.step_name, pieces))]


def loop_bounds(w: Writer, p: Pass, a: Axis) -> tuple[str, str]:
    """First and last step: tiles whose elements a condition leaves out of every reduction are skipped."""
    size = w.plan.uses[a].size
    lows, highs = [], [ceildiv(a.extent, size)]
    bodies = [(t.kind, t.body) for t in p.stages if t.body is not None]
    common = set.intersection(*(conditions(b) for _, b in bodies)) if bodies else set()
    for c in sorted(common, key=repr):
        if c.op == "and" or not all(vanishes(kind, b, c) for kind, b in bodies):
            continue
        for end, bound in condition_bounds(w, c, a).items():
            text = w.printer().text(bound)
            known = bounds(bound)
            if known is None or known[0] < 0:
                text = f"T.max({text}, {0 if end == 'least' else -1})"
            if end == "most":
                highs.append(f"{tight(text)} // {size} + 1")
            else:
                lows.append(f"{tight(text)} // {size}")
    first = functools.reduce(lambda x, y: f"T.max({x}, {y})", lows or ["0"])
    return first, functools.reduce(lambda x, y: f"T.min({x}, {y})", highs)


def condition_bounds(w: Writer, c: Scalar, a: Axis) -> dict[str, Scalar]:
    """"most", "least" -> index: for some element of the block the condition may hold up to, and from, this index of `a`."""
    if c.op in ("and", "or"):
        x, y = (condition_bounds(w, b, a) for b in c.args)
        ops = ("max", "min") if c.op == "or" else ("min", "max")
        both = {k: Scalar(op, (x[k], y[k])) for k, op in zip(("most", "least"), ops) if k in x and k in y}
        return both if c.op == "or" else {**x, **y, **both}
    if c.op == "eq":
        return {k: i for op in ("le", "ge") for k, i in condition_bounds(w, Scalar(op, c.args, "bool"), a).items()}
    found = _bound(w, c, a)
    return {} if found is None else {found[0]: found[1]}


def _bound(w: Writer, c: Scalar, a: Axis) -> tuple[str, Scalar] | None:
    """The bound by one comparison, whose quotients by a number count for all numbers that they may be rounded from."""
    signs = {"lt": (1, -1), "le": (1, 0), "gt": (-1, -1), "ge": (-1, 0)}
    if c.op not in signs or c.args[0].dtype != "int32":
        return None
    sign, slack = signs[c.op]
    x, y = linear(c.args[0]), linear(c.args[1])  # sign * (x - y) <= slack
    pieces: dict[Scalar, Size] = {}
    for (found, _), s in ((x, sign), (y, -sign)):
        for e, f in found.items():
            pieces[e] = pieces.get(e, 0) + f * s
    constant = (x[1] - y[1]) * sign - slack
    divisors = {number(e.args[1]) for e in pieces if e.op == "floordiv"}
    if len(divisors) == 1 and isinstance(n := divisors.pop(), int):  # n * (e // n) is at least e - n + 1, at most e
        constant, whole, pieces = constant * n, pieces, {}
        for e, f in whole.items():
            inner, c0 = linear(e.args[0]) if e.op == "floordiv" else ({e: n}, 0)
            pieces |= {x: pieces.get(x, 0) + f * g for x, g in inner.items()}
            constant = constant + f * c0 - (f * (n - 1) if e.op == "floordiv" and isinstance(f, int) and f > 0 else 0)
    me = pieces.pop(axis(a), 0)
    if me not in (1, -1):
        return None
    least: dict[Scalar, Size] = {}  # the least value of what stands beside +-a over the elements of a block
    for e, f in pieces.items():
        if f == 0:
            continue
        if e.op != "axis" or not isinstance(f, int) or w.plan.uses[e.value].kind in ("loop", "serial"):
            return None
        use = w.plan.uses[e.value]
        if use.kind == "tile" and use.size > 1:
            block = Axis(f"b{e.value.name}", e.value.extent)
            w.indices[block] = block.name  # it prints as the number of the block
            least[axis(block)] = f * use.size
            constant = constant + (f * (use.size - 1) if f < 0 else 0)
        elif use.kind == "whole":
            constant = constant + (f * (use.size - 1) if f < 0 else 0)
        else:
            least[e] = f
    rest = summed({e: f * -me for e, f in least.items()}, constant * -me)  # me * a + rest' <= 0
    return ("most" if me == 1 else "least"), rest


def even_pieces(w: Writer, e: Scalar, axes: Sequence[Axis]) -> tuple[Axis, list[Scalar]] | None:
    """Where selections by `a < number` divide an axis that lies in a tile as a whole evenly: (a, the expression of each piece).

    In those, `a` counts the indices of a piece from 0.  Their loads are of neighbours, which a selection would make single.
    """
    for a in (a for a in axes if w.plan.uses[a].kind == "whole" and w.size(a) == a.extent):
        tests = {x.args[0] for x in walk(e) if x.op == "where" and x.args[0].op == "lt" and x.args[0].args[0] == axis(a)}
        found = sorted(n for c in tests if isinstance(n := number(c.args[1]), int))
        starts = [0, *found]
        size = a.extent // len(starts)
        if not tests or len(found) < len(tests) or [s + size for s in starts] != [*found, a.extent]:
            continue
        return a, [at(_below(e, tests, start), {a: plus(axis(a), start)}) for start in starts]
    return None


def _below(e: Scalar, tests: set[Scalar], start: int) -> Scalar:
    """The expression with selections decided for indices from `start` on, up to the next number that decides one."""
    return rewrite(e, lambda x: _below(x.args[1 if start < x.args[0].args[1].value else 2], tests, start)
                   if x.op == "where" and x.args[0] in tests else None)
