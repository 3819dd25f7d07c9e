"""How one kernel walks over its axes: which are split over blocks, which lie in a tile as a whole, which are looped over.

    grid   one index a block              tile   `size` indices a block
    whole  all indices in one tile        loop   `size` indices an iteration       serial  one index an iteration
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tilelang.target import Target

from .expr import Axis, Scalar, Tensor, bounds, linear, number
from .graph import Dim, Size
from .nest import REDUCTIONS, Contraction, Nest, Unfit, contraction

WHOLE_DEPTH = 512  # most indices of a contracted axis that lies in a tile as a whole
WHOLE_COLUMNS = 512  # most columns of an accumulator that are kept so that what stands before is not computed again
SMALL = 128  # an axis of at most so many indices is not looped over where it could be whole
BITS = {"float64": 64, "float32": 32, "int64": 64, "uint64": 64, "int32": 32, "uint32": 32, "float16": 16, "bfloat16": 16,
        "int16": 16, "uint16": 16}


@dataclass(frozen=True)
class Role:
    """What a kernel does with an axis.  size: indices in a tile."""

    kind: str
    size: int = 1


@dataclass
class Plan:
    """A nest with roles, threads, and the notes that stand as comments in its text."""

    nest: Nest
    roles: dict[Axis, Role]
    threads: int = 256
    stages: int = 2
    panel: int = 0
    notes: list[str] = field(default_factory=list)

    def tiled(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Those of the axes that have more than one index in a tile, or are split into tiles."""
        return tuple(a for a in axes if self.roles[a].kind not in ("grid", "serial"))

    def loops(self) -> frozenset[Axis]:
        return frozenset(a for a, r in self.roles.items() if r.kind in ("loop", "serial"))


def bits_of(dtype: str) -> int:
    return BITS.get(dtype, 8)


def rows_fit(target: Target) -> int:
    """The longest row that is kept in fragments."""
    return 16384 if target.is_gpu else 65536


def plan_of(nest: Nest, target: Target, sizes: Callable[[Plan, Target], None] | None = None) -> Plan:
    """The roles of a nest's axes and the sizes of its tiles.  Raises Unfit."""
    roles: dict[Axis, Role] = {}
    _whole_axes(nest, roles, target)
    _loops(nest, roles, target)
    main = main_contraction(nest, roles)
    plan = Plan(nest, roles)
    if main is not None:
        _contraction_axes(plan, *main, target)
    else:
        _row_axes(plan, target)
    for a in nest.axes:
        roles.setdefault(a, Role("grid"))
    return plan


def static(a: Axis) -> int | None:
    return None if isinstance(a.extent, Dim) else int(a.extent)


def _whole_axes(nest: Nest, roles: dict[Axis, Role], target: Target) -> None:
    """Axes of scans and sorts, whose elements must lie in one tile."""
    for t in nest.stages:
        if t.kind not in REDUCTIONS:
            for a in (*t.over, *(a for a in t.axes if t.body is not None and a not in t.body.axes)):
                if (n := static(a)) is None or n > rows_fit(target):
                    raise Unfit(f"the axis of {t.kind} is too long for a tile")
                roles[a] = Role("whole", n)


def _loops(nest: Nest, roles: dict[Axis, Role], target: Target) -> None:
    """Reduced axes: whole where they are short or nested in another reduction, else looped over."""
    over = {a: [t for t in nest.stages if a in t.over] for t in nest.stages for a in t.over}
    for a, stages in over.items():
        outer = {o for t in stages for o in t.axes if o in over and o not in nest.axes or o in over and a not in nest.axes}
        outer -= {a}
        for o in outer:  # `a` is reduced for each element of `o`, which is reduced later: one of both is whole
            if roles.get(o) is None and (n := static(o)) is not None and n <= SMALL and not _short(a):
                roles[o] = Role("whole", n)
            elif roles.get(o) is None or roles[o].kind != "whole":
                if (n := static(a)) is None or n > WHOLE_DEPTH:
                    raise Unfit("two long loops are nested")
                roles[a] = Role("whole", n)
    for a, stages in over.items():
        n = static(a)
        if a in roles:
            continue
        rows = n is not None and n <= rows_fit(target) and a in nest.axes
        if n is not None and (rows or not any(map(contraction, stages)) and n <= _row_limit(target, stages, a)):
            roles[a] = Role("whole", n)
    for t in nest.stages:  # of several axes of one reduction the last is looped over in tiles, the others index by index
        left = [a for a in t.over if a not in roles or roles[a].kind == "whole" and len(t.over) > 1 and contraction(t) is None]
        if len(t.over) > 1 and contraction(t) is None:
            wide = [a for a in left if a in nest.axes]
            for a in left[:-1]:
                if a in wide:
                    raise Unfit("two axes of rows")
                roles[a] = Role("serial")
            left = [a for a in left[-1:] if a not in roles]
        else:
            deep = _contiguous(t, left)
            for a in left:
                if a is not deep:
                    roles[a] = Role("serial")
            left = [deep] if deep is not None else []
        for a in left:
            roles[a] = Role("loop", 0)


def _short(a: Axis) -> bool:
    return (n := static(a)) is not None and n <= SMALL


def _row_limit(target: Target, stages: list[Tensor], a: Axis) -> int:
    """Rows that no output has are kept whole where tiles are small, or where they would be read twice."""
    return 4096


def _contiguous(t: Tensor, left: list[Axis]) -> Axis | None:
    """The reduced axis that is looped over in tiles: the last index of most operands, else the longest."""
    if not left or t.body is None:
        return None
    score = {a: sum(2 for r in t.body.reads if r.args and a in r.args[-1].axes) for a in left}
    return max(left, key=lambda a: (static(a) or 1 << 30) * (1 + score[a]))


def main_contraction(nest: Nest, roles: dict[Axis, Role]) -> tuple[Tensor, Contraction] | None:
    """The last contraction whose result has no looped axis."""
    for t in reversed(nest.stages):
        c = contraction(t)
        if c is not None and not any(roles.get(a, Role("grid")).kind == "loop" for a in t.axes):
            m = [a for a in c.m if a in nest.axes]
            n = [a for a in c.n if a in nest.axes]
            if m and n:
                return t, c
    return None


def _contraction_axes(plan: Plan, t: Tensor, c: Contraction, target: Target) -> None:
    nest, roles = plan.nest, plan.roles
    rows = [a for a in c.m if a in nest.axes and a not in roles]
    columns = [a for a in c.n if a in nest.axes and a not in roles]
    chained = [s for s in nest.stages if s is not t and contraction(s) is not None and not set(columns) & set(s.axes) and
               any(a in plan.loops() for a in s.axes)]
    bm, bn, bk = 128, 128, 64
    if not target.is_gpu:
        bm, bn, bk = 64, 64, 64
    for a in rows[-1:]:
        roles[a] = Role("tile", bm)
    for a in columns[-1:]:
        n = static(a)
        if chained and n is not None and n <= WHOLE_COLUMNS:
            roles[a] = Role("whole", n)
        else:
            roles[a] = Role("tile", bn)
    for a, r in list(roles.items()):
        if r.kind == "loop":
            roles[a] = Role("loop", 128 if chained else bk)
    plan.panel = 0 if chained else 10
    plan.stages = 2 if chained or len(nest.stages) > 1 else 3
    plan.notes.append(f"blocks of {bm} x {bn} results, {bk} of the contracted axis an iteration")


def _row_axes(plan: Plan, target: Target) -> None:
    """Element-wise kernels and reductions: rows of whole tiles or of pieces."""
    nest, roles = plan.nest, plan.roles
    reduced = {a for t in nest.stages for a in t.over}
    open_axes = [a for a in nest.axes if a not in roles]
    width = 1
    for a in reduced:
        if a in roles and roles[a].kind == "loop":
            roles[a] = Role("loop", 2048 if not any(b in open_axes for b in _inner(nest, a)) else 32)
        width *= roles[a].size if a in roles and roles[a].kind in ("whole", "loop") else 1
    block = 2048
    for a in reversed(open_axes):
        n = static(a)
        room = max(1, block // width)
        if reduced and roles_width_is_rows(nest, a, reduced):
            room = min(room, 128)
        if room == 1 and a is not open_axes[-1]:
            continue
        size = room if n is None else min(n, room)
        if n is not None and size == n:
            roles[a] = Role("whole", n) if n > 1 else Role("tile", 1)
        else:
            size = 1 << (size.bit_length() - 1)
            roles[a] = Role("tile", size)
        width *= size
        if width >= block or size != n:
            break
    if not any(r.kind == "tile" for a, r in roles.items() if a in nest.axes):
        for a in nest.axes:
            if a in open_axes and a not in reduced and roles.get(a, Role("grid")).kind == "grid":
                roles[a] = Role("tile", 1)
                break
    plan.threads = 256 if width >= 2048 else 128


def roles_width_is_rows(nest: Nest, a: Axis, reduced: set[Axis]) -> bool:
    return True


def _inner(nest: Nest, a: Axis) -> list[Axis]:
    """Axes of outputs that stand after `a` in tensors: tiles of columns of a reduction over rows."""
    out = []
    for r in nest.global_reads():
        places = [k for k, i in enumerate(r.args) if a in i.axes]
        if places and places[-1] < len(r.args) - 1:
            out += [x for i in r.args[places[-1] + 1:] for x in i.axes]
    return out


def tile_place(i: Scalar, tiled: frozenset[Axis]) -> tuple[Scalar, Axis | None] | None:
    """(base, axis): i = base + axis with one tiled axis and a base of none; None where the index has another form."""
    terms, c = linear(i)
    found = [a for a in terms if not a.axes.isdisjoint(tiled)]
    if not found:
        return i, None
    if len(found) > 1 or found[0].op != "axis" or terms[found[0]] != 1:
        return None
    del terms[found[0]]
    from .expr import summed

    return summed(terms, c), found[0].value


__all__ = ["Plan", "Role", "Size", "bits_of", "bounds", "main_contraction", "number", "plan_of", "static", "tile_place"]
