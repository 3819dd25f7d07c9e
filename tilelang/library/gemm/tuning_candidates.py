"""Ways to compute a product that are worth timing: the model's choice, and what it holds for nearly as good.

Tiles by price, the first few whatever they are, then of each kind (rows, turned or not, parts of k) the best; products cut
in two; copies of operands where loads of single elements are the model's choice, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from tilelang.ir import dtype

from ..agreement import products_agree
from ..arrays import zeros
from ..tuning import MOST, Candidate, Task
from .few_rows import FewRows
from .gemv import VectorForm
from .operands import Operand
from .plan import Choice, Request, Route, chosen, grouped, problem_of, product, routes, sized, tiled, vectors
from .tail_plan import cuts
from .tile_cost import Chip, Problem, Tile, candidates, finished, price

_FIRST = 6  # tiles that are taken in order of price
_FAR = 1.5  # times the least price: no tile beyond
_CUTS, _OTHER_ROUTE = 2, 2  # candidates of these kinds
_CUT_FAR = 1.08  # of the best tile's price: no cut beyond


def choices(r: Request, most: int = MOST) -> list[Choice]:
    """At most so many ways, all different, the model's first."""
    model = chosen(r)
    out, seen = [model], {str(config(model))}

    def add(found: Iterator[Choice] | Sequence[Choice], count: int) -> None:
        for c in found:
            if count and len(out) < most and str(config(c)) not in seen:
                seen.add(str(config(c)))
                out.append(c)
                count -= 1

    first, *others = routes(r)
    in_one_pass = vectors(r)
    if in_one_pass is not None:
        add([Choice(in_one_pass[0].f, vector=v) for v in _shared_out(in_one_pass[0])], most)
    for other in others:
        add(_of_route(r, other, 0), _OTHER_ROUTE)
    add(_of_route(r, first, _CUTS), most)
    return out


def _shared_out(v: VectorForm | FewRows) -> Iterator[VectorForm | FewRows]:
    """The same, k in more or fewer parts."""
    if isinstance(v, FewRows):
        yield from (v, *(replace(v, parts=n, deep=deep) for n, deep in ((8, 64), (4, 64), (2, 128))))
        return
    for parts in (2 * v.parts, v.parts // 2, 1):
        if 1 <= parts <= max(1, v.steps // 3):
            yield replace(v, parts=parts)


def _of_route(r: Request, route: Route, cut: int) -> Iterator[Choice]:
    """Products of the operands as they are copied or not: some cut in two, then by one tile."""
    ready, batch, rows = sized(r, route)
    chip, p = problem_of(ready, batch, rows)
    tiles = by_price(chip, p)
    if not tiles:
        return
    if cut and chip.kind == "wgmma" and p.kind != "float" and not (p.two_level or p.open_rows):
        for _, tile, at in cuts(chip, p, tiles[0].seconds, _CUT_FAR)[:cut]:
            yield Choice(tiled(ready, tile, at), route[1:])
    for tile in of_all_kinds(tiles):
        yield Choice(tiled(ready, tile), route[1:])


def by_price(chip: Chip, p: Problem) -> list[Tile]:
    """Tiles that the machine can hold, the cheapest first, with what the model expects of them."""
    priced = sorted(((price(chip, p, t), k, t) for k, t in enumerate(candidates(chip, p))), key=lambda x: x[:2])
    return [replace(finished(chip, p, t), seconds=s) for s, _, t in priced if s <= _FAR * priced[0][0]]


def of_all_kinds(tiles: list[Tile]) -> Iterator[Tile]:
    """The first few, at most two of a size, then of each kind the first that is not among them, then the rest."""
    first: list[Tile] = []
    for t in tiles:
        if len(first) < _FIRST and sum(_size(t) == _size(x) for x in first) < 2:
            first.append(t)
    kinds = {(t.bm, t.turned, t.parts) for t in first}
    others: dict[Any, Tile] = {}
    for t in tiles:
        if (t.bm, t.turned, t.parts) not in kinds:
            others.setdefault((t.bm, t.turned, t.parts), t)
    yield from dict.fromkeys([*first, *others.values(), *tiles])


def _size(t: Tile) -> tuple[int, int, bool, int]:
    return t.bm, t.bn, t.turned, t.parts


def config(c: Choice) -> dict[str, Any]:
    """What tells a choice from others for the same product, as JSON values."""
    if isinstance(c.vector, FewRows):
        return {"few": [c.vector.parts, c.vector.deep]}
    if c.vector is not None:
        return {"vector": c.vector.parts}
    out: dict[str, Any] = {"tile": _numbers(c.form.tile)}
    if c.form.cut is not None:
        out["cut"] = [c.form.cut.axis, c.form.cut.at, _numbers(c.form.cut.tile)]
    if any(c.copied):
        out["copied"] = [x is not None for x in c.copied]
    return out


def _numbers(t: Tile) -> dict[str, Any]:
    """The fields of a tile that are not as usual."""
    plain = {"parts": 1, "turned": False, "moved": False, "staged": False, "wide": 0, "soon": False, "cluster": (),
             "from_registers": False}
    return {k: list(v) if k == "cluster" else int(v) for k, v in asdict(t).items() if k != "seconds" and v != plain.get(k)}


def key(r: Request, model: Choice) -> list[Any]:
    """JSON values that decide which choice is fastest.  Strides count as far as loads feel them."""
    f, size = model.form, dtype(r.form.types[0]).bytes
    sizes = [f.m, f.n, f.k, f.batch, f.shared_b, f.groups, f.open_rows]
    return ["matmul", sizes, f.types, f.bias, f.activation, f.scaling, r.kind, r.two_level,
            [_stored(x, size) for x in (r.left, r.right)]]


def _stored(x: Operand, size: int) -> list[Any]:
    return [x.transposed, x.plain, x.fits(size), x.row_start(size), x.batch > 1 and x.lead == 0]


def product_task(r: Request, like: Any, shape: tuple[int, ...], given: tuple[Any, ...], along: tuple[int, int]) -> Task:
    """The task of finding the best choice for a product.

    given: a, b, bias, scale_a, scale_b.  along: dimensions of a and b that hold k.
    """
    a, b, bias, *scales = given

    def runner(c: Choice) -> Any:
        run = product(r, c, like, shape)
        return lambda out: run(*given, out)

    agree = products_agree(r.form.k, r.kind, r.two_level, a, b, along, bias, tuple(scales), r.form.scaling == "block")
    return _task(r, like, shape, runner, agree)


def grouped_task(r: Request, like: Any, shape: tuple[int, ...], given: tuple[Any, ...], along: tuple[int, int]) -> Task:
    """The same for a grouped product.  given: a, b, bias, sizes."""

    def runner(c: Choice) -> Any:
        run = grouped(r, c, like)
        return lambda out: run(*given, out)

    return _task(r, like, shape, runner, products_agree(r.form.k, r.kind, r.two_level, *given[:2], along, given[2]))


def _task(r: Request, like: Any, shape: tuple[int, ...], runner: Any, agree: Any) -> Task:
    f, model = r.form, chosen(r)
    about = f"{'grouped ' if f.groups else ''}matmul {'x'.join(map(str, (*shape[:-2], f.m, f.n, f.k)))} {f.types[0]}"
    return Task(about, key(r, model), like, r.place.target, r.place.backend,
                lambda: [Candidate(config(c), lambda c=c: runner(c), c) for c in choices(r)],
                lambda: (zeros(like, shape, f.types[2]),), lambda x, y: agree(x[0], y[0]))


__all__ = ["by_price", "choices", "config", "grouped_task", "key", "of_all_kinds", "product_task"]
