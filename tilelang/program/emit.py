"""The text of one kernel: a readable `@T.prim_func`, whose comments say what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilelang.target import Target
from tilelang.target.machine import MAX_GRID

from .expr import Axis, Scalar, Tensor, axis, read
from .graph import text_of
from .nest import Pass, Unfit, output_axes
from .plan import Plan
from .loops import ensure_outer, even_pieces, iterations, write_pass
from .rescale import is_float
from .stages import whole_stage
from .text import in_steps, wide
from .writer import Facts, Writer, ceildiv, digits, in_three_runs

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
