"""The loop nest of one kernel: its outputs, and the reductions that it computes on the way, in the axes of the kernel.

A reduction that a kernel computes for itself is made again in the kernel's axes (a *stage*).  Loops over axes of equal extent
become one axis where their bodies read the same elements.  Factors leave the sums (rescale.hoist).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from .expr import Axis, Scalar, Tensor, at, axis, const, number, plus, reached, read, rewrite, times
from .graph import Dim, Size, count_elements
from .rescale import (base_two, depends, factors, hoist, independent, is_float, multiplied, normal, rescaling, signed_sum,
                      terms)

REDUCTIONS = ("sum", "max", "min", "prod", "argmax", "argmin")


class Unfit(Exception):
    """These tensors cannot be computed in one kernel."""


@dataclass
class Nest:
    """What one kernel computes.

    axes: of the outputs.  outputs: the tensors it stores, with their elements in the kernel's axes.  stages: the reductions
    and other tensors that it keeps in tiles, operands first.  limits: reduced axis -> the condition of its indices.
    """

    axes: tuple[Axis, ...]
    outputs: list[tuple[Tensor, Scalar]] = field(default_factory=list)
    stages: list[Tensor] = field(default_factory=list)
    limits: dict[Axis, Scalar] = field(default_factory=dict)

    def bodies(self) -> list[Scalar]:
        return [t.body for t in self.stages if t.body is not None] + [e for _, e in self.outputs]

    def views(self) -> list[Tensor]:
        """The views that it reads and stores, in their order."""
        read = [r.value for e in self.bodies() for r in sorted(e.reads, key=repr)]
        return [t for t in dict.fromkeys([*read, *(t for t, _ in self.outputs)]) if t.kind == "view"]

    def global_reads(self) -> set[Scalar]:
        kept = set(self.stages)
        return {r for e in self.bodies() for r in e.reads if r.value not in kept}


def output_axes(nest: Nest, t: Tensor) -> tuple[Axis, ...]:
    """The nest's axes that are those of an output: its own, or in order, by their extents; its own of one index otherwise."""
    if set(t.axes) <= set(nest.axes):
        return t.axes
    out, left = [], list(nest.axes)
    for a in t.axes:
        k = next((k for k, x in enumerate(left) if x.extent == a.extent), None)
        if k is None and a.extent != 1:
            raise Unfit("outputs of different shapes")
        out.append(a if k is None else left[k])
        left = left if k is None else left[k + 1:]
    return tuple(out)


def base_of(t: Tensor) -> Tensor:
    """The tensor that a view shows."""
    return t.attrs.get("base", t)  # type: ignore[no-any-return]


def row_digits(e: Scalar) -> tuple[Scalar, ...]:
    """The indices of a read of a matrix of windows that are digits of its row; none of other reads."""
    count: Size = 1
    for k, s in enumerate(e.value.shape if "rows" in e.value.attrs else ()):
        count = count * s
        if count == e.value.attrs["rows"]:
            return e.args[:k + 1]
    return ()


MOST_STAGES = 16  # reductions of a kernel: what they cost is estimated many times


def nest_of(outputs: Iterable[Tensor], stored: frozenset[Tensor]) -> Nest:
    """The nest that computes `outputs` from inputs and tensors that are `stored` by other kernels.

    Raises Unfit where the outputs have no common axes, or one tensor would be needed at places that tiles cannot give.
    """
    # loops of the others share the axes of the first one
    outputs = sorted((_digits(t, stored) for t in outputs), key=lambda t: (-sum(a.extent != 1 for a in t.axes), -len(t.axes)))
    axes = outputs[0].axes
    names = free_names(outputs)
    axes = tuple(Axis(next(names), a.extent) for a in axes)
    made = _Stages(axes, stored - frozenset(map(base_of, outputs)), names)
    for t in outputs:
        made.store(t)
    return made.nest


def _digits(t: Tensor, stored: frozenset[Tensor]) -> Tensor:
    """A view of an output with two axes for one of which quotient and remainder are places in a GEMM of this kernel."""
    body = t.body if t.kind == "map" else None
    for a in t.axes if body is not None else ():
        assert body is not None
        found = {x for r in body.reads for x in r.args if x.op in ("floordiv", "mod") and x.args[0] == axis(a) and
                 r.value not in stored and contraction(r.value) is not None}
        n = next((number(x.args[1]) for x in found), None)
        if isinstance(n, int) and isinstance(a.extent, int) and a.extent % n == 0 and len({x.args[1] for x in found}) == 1:
            high, low = Axis(a.name, a.extent // n), Axis(f"{a.name}_in", n)
            new = {x: axis(high if x.op == "floordiv" else low) for x in found}
            new[axis(a)] = plus(times(axis(high), n), axis(low))
            body = rewrite(body, new.get)
            axes = tuple(y for x in t.axes for y in ((high, low) if x is a else (x,)))
            return replace(t, axes=axes, body=body, attrs={**t.attrs, "base": base_of(t)})
    return t


def free_names(outputs: list[Tensor]) -> Iterator[str]:
    """Names of axes that no tensor has."""
    taken = {n for t in reached(outputs, lambda t: [r.value for r in t.body.reads] if t.body is not None else [])
             for n in (t.name, *(n for s in t.shape if isinstance(s, Dim) for n in s.names))}
    for k in range(10**6):
        name = "ijlmnpqk"[k] if k < 8 else f"i{k}"
        if not taken & {name, f"b{name}", f"step_{name}"}:
            yield name


class _Stages:
    def __init__(self, axes: tuple[Axis, ...], stored: frozenset[Tensor], names: Iterator[str]) -> None:
        self.names = names
        self.nest = Nest(axes)
        self.stored = stored
        self.over: list[Axis] = []  # axes that loops over them share
        self.seen: set[Scalar] = set()
        self.made: dict[Any, Scalar] = {}

    def store(self, t: Tensor) -> None:
        places = {a: axis(x) if x in self.nest.axes else const(0) for a, x in zip(t.axes, output_axes(self.nest, t))}
        if t.kind == "map":
            assert t.body is not None
            out = replace(t, kind="view") if base_of(t) is not t else t
            self.nest.outputs.append((out, self._ready(self.element(at(t.body, places)))))
        else:
            self.nest.outputs.append((t, self._ready(self.stage(t, tuple(places[a] for a in t.axes)))))

    def _ready(self, e: Scalar) -> Scalar:
        return base_two(normal(e))

    def element(self, e: Scalar) -> Scalar:
        """The expression with reads of the kernel's stages in place of those of tensors that nothing stores."""
        self.seen |= e.reads

        def change(x: Scalar) -> Scalar | None:
            if x.op == "read" and x.value.kind not in ("input", "state") and x.value not in self.stored:
                return self.stage(x.value, tuple(self.element(i) for i in x.args))
            return None if x.reads else x

        return rewrite(e, change)

    def stage(self, t: Tensor, places: tuple[Scalar, ...]) -> Scalar:
        """The value of a tensor at index expressions, computed in this kernel."""
        key = (t, places)
        if key not in self.made:
            self.made[key] = self._stage(t, places)
        return self.made[key]

    def _stage(self, t: Tensor, places: tuple[Scalar, ...]) -> Scalar:
        assert t.body is not None
        if t.kind == "map":
            return self.element(at(t.body, dict(zip(t.axes, places))))
        where = dict(zip(t.axes, places))
        free = frozenset().union(*(i.axes for i in places)) if places else frozenset()
        for a, i in where.items():  # tiles have whole axes of scans and sorts
            if (a in t.over or t.kind not in REDUCTIONS and a not in t.body.axes) and i.op != "axis":
                raise Unfit(f"{t.name} is read at other places than it is computed")
        over = []
        body = at(t.body, where)
        for a in [a for a in t.over if a.extent != 1] or t.over[:1]:
            if a in where:
                over.append(where[a].value)
                continue
            body, chosen = self._shared(t, body, a, free | frozenset(over))
            over.append(chosen)
        return self._reduced(t, self._ready(self.element(body)), tuple(over), free)

    def _reduced(self, t: Tensor, body: Scalar, over: tuple[Axis, ...], free: frozenset[Axis]) -> Scalar:
        """A reduction without what leaves it: factors, and terms of a sum that are reductions of the same axes, for which it
        would have to wait."""
        waiting, inner = list[tuple[int, Scalar]](), list[tuple[int, Scalar]]()
        for sign, x in terms(body) if t.kind == "sum" and is_float(body.dtype) else ():
            waits = x.axes.isdisjoint(over) and any(r.value.over == over for r in x.reads)
            (waiting if waits else inner).append((sign, x))
        if waiting and inner:
            count = const(count_elements(a.extent for a in over), body.dtype)
            total = self._reduced(t, signed_sum(inner, body.dtype), over, free)
            return signed_sum([(1, total), *((s, Scalar("mul", (x, count), body.dtype)) for s, x in waiting)], body.dtype)
        outside, inside = hoist(t.kind, body, frozenset(over))
        sums = independent(inside, over) if t.kind == "sum" and is_float(body.dtype) else [(inside, tuple(over))]
        return multiplied([*((self._keep(t, e, axes, free), False) for e, axes in sums), *outside], body.dtype)

    def _keep(self, t: Tensor, body: Scalar, over: tuple[Axis, ...], free: frozenset[Axis]) -> Scalar:
        place = frozenset() if t.kind in REDUCTIONS else free  # a sort has an axis that its body does not have
        key = (t.kind, body, over, repr(t.attrs), place)
        if key not in self.made:
            kept = (body.axes - frozenset(over)) | place
            axes = tuple(a for a in (*self.nest.axes, *self.over) if a in kept)
            accum = str(t.attrs.get("accum") or t.dtype)
            kind = accum if t.kind in ("sum", "prod") or t.kind.startswith("scan") else t.dtype
            kind = "float32" if kind in ("float16", "bfloat16") else kind
            made = Tensor(t.name, axes, kind, t.kind, body, over, dict(t.attrs), t.span)
            self.nest.stages.append(made)
            if len(self.nest.stages) > MOST_STAGES:
                raise Unfit("a kernel of more reductions than one is worth")
            self.made[key] = read(made)
        return self.made[key]

    def _shown(self, e: Scalar) -> Scalar:
        """The expression with the elements of maps that nothing stores in place of reads of them."""
        def change(x: Scalar) -> Scalar | None:
            t = x.value
            if x.op != "read" or t.kind != "map" or t.body is None or t in self.stored:
                return None
            return self._shown(at(t.body, dict(zip(t.axes, x.args))))

        return rewrite(e, change)

    def _shared(self, t: Tensor, body: Scalar, a: Axis, free: frozenset[Axis]) -> tuple[Scalar, Axis]:
        """The axis of the kernel that a loop over `a` counts: one that reads the same elements already, or a new one."""
        best, found, score, shown = body, None, -1, self._shown(body)
        for c in (*self.over, *self.nest.axes):
            if c.extent == a.extent and c not in free:
                shared = len(at(shown, {a: axis(c)}).reads & self.seen)
                if shared > score and (shared or c in self.over):
                    best, found, score = at(body, {a: axis(c)}), c, shared
        if found is None:
            found = Axis(next(self.names), a.extent)
            best = at(body, {a: axis(found)})
        if found not in self.over and found not in self.nest.axes:
            self.over.append(found)
        return best, found


# ---- contractions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contraction:
    """t[m, n] = sum over k of a[m, k] * b[k, n].  m, n: axes that only one of the factors has."""

    a: Scalar
    b: Scalar
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]


def contraction(t: Tensor) -> Contraction | None:
    """The factors where a sum is that of a GEMM, or None."""
    if t.kind != "sum" or t.body is None:
        return None
    pieces = factors(t.body)
    if len(pieces) < 2 or any(below for _, below in pieces):
        return None
    over, kept = frozenset(t.over), frozenset(t.axes)
    for i, j in permutations(range(len(pieces)), 2):  # by place: one factor may stand there several times
        x, y = pieces[i][0], pieces[j][0]
        if not (x.axes & y.axes & over) or not (x.axes - y.axes) & kept or not (y.axes - x.axes) & kept:
            continue
        sides: tuple[list[Scalar], list[Scalar]] = ([x], [y])
        for f in (f for k, (f, _) in enumerate(pieces) if k not in (i, j)):
            side = 0 if f.axes <= x.axes | over else 1 if f.axes <= y.axes | over else None
            if side is None:
                break
            sides[side].append(f)
        else:
            return _ordered(t, *(multiplied([(f, False) for f in s], s[0].dtype) for s in sides))
    return None


def _ordered(t: Tensor, a: Scalar, b: Scalar) -> Contraction:
    """The factor whose axes come first in the result is the left one."""
    over = frozenset(t.over)
    m, n = (tuple(x for x in t.axes if x in (p.axes - q.axes - over)) for p, q in ((a, b), (b, a)))
    if t.axes.index(m[-1]) > t.axes.index(n[-1]):
        a, b, m, n = b, a, n, m
    return Contraction(a, b, m, n)


# ---- passes over loops ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """Reductions that one pass over an axis computes together.

    factors: reduction -> the factor by which its partial result follows the others (rescale.rescaling).
    """

    axes: tuple[Axis, ...]
    stages: tuple[Tensor, ...]
    factors: dict[Tensor, Scalar]
    old: dict[Tensor, Tensor]


def passes(nest: Nest, loops: frozenset[Axis]) -> list[Pass]:
    """The passes over loops, in their order.  A reduction joins the first pass in which it can be computed."""
    out: list[Pass] = []
    for t in nest.stages:
        looped = tuple(a for a in t.over if a in loops)
        if not looped or t.kind not in REDUCTIONS:
            continue
        target = next((p for p in out if p.axes == looped and _joins(t, p, out)), None)
        if target is None:
            out.append(Pass(looped, (t,), {}, {}))
            continue
        moving = frozenset(target.stages)
        assert t.body is not None
        found = dict(target.factors)
        old = dict(target.old)
        if depends(t.body, moving):
            old.update({s: old.get(s) or Tensor(f"{s.name}_before", s.axes, s.dtype, "before") for s in moving
                        if any(r.value is s for r in t.body.reads)})
            factor = rescaling(t, moving, old)
            assert factor is not None  # _joins has asked
            found[t] = factor
        out[out.index(target)] = Pass(looped, (*target.stages, t), found, old)
    return out


def _joins(t: Tensor, p: Pass, all_passes: list[Pass]) -> bool:
    """Whether a reduction can be computed in a pass: it needs nothing of later passes, and follows those of this one."""
    assert t.body is not None
    later = frozenset(s for q in all_passes[all_passes.index(p) + 1:] for s in q.stages)
    if depends(t.body, later):
        return False
    moving = frozenset(p.stages)
    if not depends(t.body, moving):
        return True
    return rescaling(t, moving, {s: Tensor("before", s.axes, s.dtype, "before") for s in moving}) is not None

