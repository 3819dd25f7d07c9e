"""The text of one kernel: a readable `@T.prim_func`, whose comments say what was chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, prod

from tilelang.target import Target
from tilelang.target.machine import MAX_GRID

from .expr import Axis, Scalar, Tensor, at, axis, bounds, const, linear, number, plus, read, rewrite, summed, walk
from .graph import Size, text_of
from .nest import REDUCTIONS, Pass, Unfit, output_axes
from .plan import Plan
from .rescale import EXPONENTIALS, NEUTRAL, conditions, is_float, neutral, vanishes
from .stages import NAMES, REDUCE, accumulate, gemm, reduce, whole_stage, with_reduced
from .text import in_steps, wide
from .writer import Facts, Tile, Writer, ceildiv, digits, in_three_runs, tight

LONG_ROW = 16384  # elements of a tile, from which a block that has no other one as long has 1024 threads


def kernel_text(plan: Plan, name: str, parameters: Sequence[tuple[str, Tensor]], target: Target) -> str:
    """The prim_func of a plan.  parameters: names and tensors, inputs first, then the outputs."""
    def write(facts: Facts) -> Writer:
        w = Writer(plan, parameters, target, facts, ensure_stage)
        for t, e in plan.nest.outputs:
            if not e.axes & plan.loops():
                store(w, t, e)
        store_loops(w)
        return w

    w = in_three_runs(write)
    if sum(prod(t.shape) > LONG_ROW for t in w.allocations) == 1 and target.is_gpu and not has_gemm(w):
        plan.threads = 1024  # one tile of a long row in the registers of a block: more warps hide its functions
    head = [*(f"# {n}" for n in plan.notes), "@T.prim_func", *head_lines(name, parameters)]
    return "\n".join([*head, *grid(w), *w.views, *allocation_lines(w), *w.lines]) + "\n"


def _blocks(extent: str) -> int:
    """The number of blocks that a dimension of the grid has; 0 where it is known at the call."""
    factors = extent.replace("(", "").replace(")", "").split(" * ")
    return prod(map(int, factors)) if all(f.isdigit() for f in factors) else 0


def head_lines(name: str, parameters: Sequence[tuple[str, Tensor]]) -> list[str]:
    """The lines of `def`."""
    return _wrapped(f"def {name}(", [f'{n}: T.Tensor({text_of(t.shape)}, "{t.dtype}")' for n, t in parameters], "):")


def grid(w: Writer) -> list[str]:
    """The line of T.Kernel: column tiles first, then rows, then all other axes as one number."""
    uses, nest = w.plan.uses, w.plan.nest
    tiles = [a for a in reversed(nest.axes) if uses[a].kind == "tile"]
    single = [a for a in nest.axes if uses[a].kind == "grid" and a.extent != 1]
    names, sizes, after = [], [], []
    for a in tiles[:2]:
        names.append(w.block_name(a))
        sizes.append(ceildiv(a.extent, uses[a].size))
    rest = [(w.block_name(a), ceildiv(a.extent, uses[a].size)) for a in reversed(tiles[2:])]
    rest = [*((w.block_name(a), str(a.extent)) for a in single), *rest]
    if len(rest) == 1 or rest and len(rest) + len(names) <= 3:
        names += [n for n, _ in reversed(rest)]
        sizes += [s for _, s in reversed(rest)]
    elif rest:
        names.append(w.rest_name)
        sizes.append(" * ".join(f"({s})" if " " in s else s for _, s in rest))
        after = [f"        {x}" for x in digits(w.rest_name, rest)]
    if not names:
        names, sizes = [w.rest_name], ["1"]
    far = next((k for k, n in enumerate(sizes) if k and _blocks(n) > MAX_GRID[1]), 0)
    for x in (names, sizes):  # only the first dimension of a grid may be long
        x.insert(0, x.pop(far))
    shown = names[0] if len(names) == 1 else f"({', '.join(names)})"
    out = [f"    with T.Kernel({', '.join(sizes)}, threads={w.plan.threads}) as {shown}:", *after]
    if w.plan.swizzle:
        size, how = w.plan.swizzle
        out.append(f"        T.use_swizzle({size})" if how == "row" else f'        T.use_swizzle({size}, order="{how}")')
    return out + (["        T.pdl_sync()", "        T.pdl_trigger()"] if w.plan.choice.early else [])


def allocation_lines(w: Writer) -> list[str]:
    """The lines that allocate the tiles."""
    return [f'        {t.name} = T.alloc_{t.scope}({text_of(t.shape)}, "{t.dtype}")' for t in w.allocations]


def store(w: Writer, t: Tensor, e: Scalar) -> None:
    """Writes an output: by T.copy of a tile where the kernel has tiles, else element by element."""
    w.ensure(e)
    places = output_axes(w.plan.nest, t)
    axes = w.order(tuple(a for a in places if a in w.plan.nest.axes))
    wanted = "int32" if t.dtype == "bool" else wide(t.dtype)
    place = w.copyable(read(t, tuple(map(axis, places))), axes) if set(places) <= set(w.plan.nest.axes) else None
    source = e.args[0] if e.op == "cast" and e.dtype == t.dtype and e not in w.tiles and is_float(e.dtype) else e
    if w.stages and place is not None and not w.dummy and t.dtype != "bool" and (
            e in w.tiles and w.tiles[e].axes == axes or has_gemm(w)):
        w.say(f"T.copy({w.name_of(w.root(source, 'out', axes, wanted))}, {place})")
        return
    transpose(w, e, axes)
    pieces = None if w.stages or w.shared else even_pieces(w, source, axes)
    if pieces is not None:
        a, elements = pieces
        size = w.size(a) // len(elements)
        indices = [", ".join(f"{w.indices[x]} + {k * size}" if x is a and k else w.indices.get(x, "0") for x in places)
                   for k in range(len(elements))]
        texts = (stored(t, w.printer().text(one)) for one in elements)
        w.parallel(axes, *(f"{w.names[t]}[{i}] = {one}" for i, one in zip(indices, texts)), sizes={a: size})
        return
    w.ready(e)
    w.guarded(e)
    named, text = in_steps(w.printer(), source, w.unused)
    w.parallel(axes, *named, f"{w.names[t]}[{', '.join(w.indices.get(a, '0') for a in places) or '()'}] = {stored(t, text)}")


def stored(t: Tensor, text: str) -> str:
    """The text of an element in the type of the tensor that holds it."""
    return text if t.dtype == wide(t.dtype) else f'T.cast({text}, "{t.dtype}")'


def transpose(w: Writer, e: Scalar, axes: tuple[Axis, ...]) -> None:
    """Copies what an element-wise kernel reads by columns through shared memory."""
    for r in sorted(e.reads, key=repr):
        if not w.stages and len(axes) == 2 and r not in w.shared and all(w.size(a) > 1 for a in axes):
            if tile := w.copied(r, axes[::-1]):
                w.shared[r] = tile


def has_gemm(w: Writer) -> bool:
    """Whether the kernel has a GEMM, so that its results lie in fragments."""
    return any(w.plan.gemm_of(t) is not None for t in w.plan.nest.stages)


def store_loops(w: Writer) -> None:
    """Outputs along a looped axis: another walk over it."""
    loops = w.plan.loops()
    found = [(t, e) for t, e in w.plan.nest.outputs if set(output_axes(w.plan.nest, t)) & loops]
    if not found:
        return
    (a,) = {a for t, _ in found for a in output_axes(w.plan.nest, t) if a in loops}
    again = Pass((a,), (), {}, {})
    for _, e in found:
        ensure_outer(w, e, again)
    with iterations(w, again):
        for t, e in found:
            store(w, t, e)


def ensure_stage(w: Writer, t: Tensor) -> None:
    """Writes a stage where its value is not there yet."""
    if t in w.done or w.current is not None and t in w.current.stages:
        return
    p = next((p for p in w.passes if t in p.stages), None)
    if p is not None:
        if w.current is not None:
            raise Unfit("a loop inside of a loop")
        write_pass(w, p)
        return
    assert t.body is not None
    w.ensure(t.body)
    whole_stage(w, t)
    w.done.add(t)


def _wrapped(head: str, pieces: Sequence[str], tail: str, width: int = 118) -> list[str]:
    lines, line = [], head
    for k, p in enumerate(pieces):
        piece = p + (", " if k + 1 < len(pieces) else tail)
        if len(line) + len(piece.rstrip()) > width and line.strip():
            lines.append(line.rstrip())
            line = " " * (len(head)) + piece
        else:
            line += piece
    return [*lines, line.rstrip()]


# ---- loops ------------------------------------------------------------------------------------------------------------

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
