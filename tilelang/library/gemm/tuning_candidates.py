"""The ways to compute a GEMM that are worth timing: the model's choice and others of little more estimated cost.

Tiles in order of cost: the first few of any kind, then the best of each kind (rows, swap-AB or not, splits of k). Copies of
operands where the model chooses loads by elements, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from tilelang.ir import dtype

from ..agreement import gemms_agree
from ..arrays import zeros
from ..place import Place
from ..tuning import MOST, Candidate, Task
from .build import planned_run
from .few_rows import FewRows
from .gemv import GemvForm
from .operands import Operand
from .plan import MatmulPlan, Route, plan_matmul, routes, sized, thin_forms, tile_problem
from .problem import MatmulProblem
from .tile import Chip, Tile, TileProblem
from .tile_cost import candidates, estimate_seconds, finished

_FIRST = 6  # tiles that are taken in order of cost
_FAR = 1.5  # most cost of a tile, relative to the least
_OTHER_ROUTE = 2  # number of candidates of a route that the model does not choose


def choices(p: MatmulProblem, chip: Chip, most: int = MOST) -> list[MatmulPlan]:
    """The plans to time, all different, at most `most`, the model's first."""
    model = plan_matmul(p, chip)
    out, seen = [model], {str(config(model))}

    def add(found: Iterator[MatmulPlan] | Sequence[MatmulPlan], count: int) -> None:
        for c in found:
            if count and len(out) < most and str(config(c)) not in seen:
                seen.add(str(config(c)))
                out.append(c)
                count -= 1

    first, *others = routes(p, chip)
    thin = thin_forms(p, chip)
    if thin is not None:
        add([MatmulPlan(thin[0].f, thin=v) for v in _other_splits(thin[0])], most)
    for other in others:
        add(_of_route(p, chip, other), _OTHER_ROUTE)
    add(_of_route(p, chip, first), most)
    return out


def _other_splits(v: GemvForm | FewRows) -> Iterator[GemvForm | FewRows]:
    """The plan with more or fewer splits of k."""
    if isinstance(v, FewRows):
        yield from (v, *(replace(v, splits=n, deep=deep) for n, deep in ((8, 64), (4, 64), (2, 128))))
        return
    for splits in (2 * v.splits, v.splits // 2, 1):
        if 1 <= splits <= max(1, v.steps // 3):
            yield replace(v, splits=splits)


def _of_route(p: MatmulProblem, chip: Chip, route: Route) -> Iterator[MatmulPlan]:
    """The plans of one route."""
    ready, batch, rows = sized(p, route)
    chip, problem = tile_problem(ready, chip, batch, rows)
    tiles = by_cost(chip, problem)
    for tile in of_all_kinds(tiles):
        yield MatmulPlan(ready.form(tile), route[1:])


def by_cost(chip: Chip, p: TileProblem) -> list[Tile]:
    """Tiles that the machine can hold, in order of cost, with the model's estimates."""
    estimated = sorted(((estimate_seconds(chip, p, t), k, t) for k, t in enumerate(candidates(chip, p))), key=lambda x: x[:2])
    return [replace(finished(chip, p, t), seconds=s) for s, _, t in estimated if s <= _FAR * estimated[0][0]]


def of_all_kinds(tiles: list[Tile]) -> Iterator[Tile]:
    """Tiles in the order of timing: the first few, at most two of a size, then the first of each other kind, then the rest."""
    first: list[Tile] = []
    for t in tiles:
        if len(first) < _FIRST and sum(_size(t) == _size(x) for x in first) < 2:
            first.append(t)
    kinds = {(t.bm, t.swap_ab, t.splits) for t in first}
    others: dict[Any, Tile] = {}
    for t in tiles:
        if (t.bm, t.swap_ab, t.splits) not in kinds:
            others.setdefault((t.bm, t.swap_ab, t.splits), t)
    yield from dict.fromkeys([*first, *others.values(), *tiles])


def _size(t: Tile) -> tuple[int, int, bool, int]:
    return t.bm, t.bn, t.swap_ab, t.splits


def config(plan: MatmulPlan) -> dict[str, Any]:
    """The JSON values that distinguish a plan from others for the same problem."""
    if isinstance(plan.thin, FewRows):
        return {"few_rows": [plan.thin.splits, plan.thin.deep]}
    if plan.thin is not None:
        return {"gemv": plan.thin.splits}
    out: dict[str, Any] = {"tile": _numbers(plan.form.tile)}
    if any(plan.copied):
        out["copied"] = [x is not None for x in plan.copied]
    return out


def _numbers(t: Tile) -> dict[str, Any]:
    """The fields of a tile that differ from their defaults."""
    plain = {"splits": 1, "swap_ab": False, "overlapping": False, "staged": False, "wide": 0, "pdl": False, "cluster": (),
             "from_registers": False, "order": "row"}
    return {k: list(v) if k == "cluster" else v if k == "order" else int(v) for k, v in asdict(t).items()
            if k != "seconds" and v != plain.get(k)}


def key(p: MatmulProblem, model: MatmulPlan) -> list[Any]:
    """The JSON values that decide which plan is fastest. Strides count as far as loads depend on them."""
    f, size = model.form, dtype(p.types[0]).bytes
    sizes = [f.m, f.n, f.k, f.batch, f.shared_b, f.groups, f.open_rows]
    return ["matmul", sizes, f.types, f.bias, f.activation, f.scaling, p.kind, p.two_level,
            [_stored(x, size) for x in (p.left, p.right)]]


def _stored(x: Operand, size: int) -> list[Any]:
    return [x.transposed, x.plain, x.fits(size), x.row_start(size), x.batch > 1 and x.lead == 0]


def matmul_task(p: MatmulProblem, at: Place, like: Any, shape: tuple[int, ...], given: tuple[Any, ...],
                magnitudes: Callable[[], Any]) -> Task:
    """The tuning task of a call of matmul or grouped_matmul.

    given: a, b, bias, then scale_a and scale_b or the groups' sizes. magnitudes: as gemms_agree takes it.
    """
    agree = gemms_agree(p.k, p.kind, p.two_level, magnitudes)

    def runner(plan: MatmulPlan) -> Any:
        run = planned_run(p, plan, at, like, shape)
        return lambda out: run(*given, out)

    about = f"{'grouped ' if p.groups else ''}matmul {'x'.join(map(str, (*shape[:-2], p.m, p.n, p.k)))} {p.types[0]}"
    return Task(about, key(p, plan_matmul(p, at.chip)), like, at.target, at.backend,
                lambda: [Candidate(config(c), lambda c=c: runner(c), c) for c in choices(p, at.chip)],
                lambda: (zeros(like, shape, p.types[2]),), lambda x, y: agree(x[0], y[0]))
