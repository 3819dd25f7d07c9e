"""Other axes for a nest: loops that are divided into pieces, and axes that are joined into one.

Division gives results of pieces, and the reductions that combine them:

    R = reduce over k: f(k, J)      R_p = reduce over the k of piece p: f(k, J_p)      R = reduce over p: R_p * factor(J_p -> J)

with the factor of rescale.rescaling, where J is another reduction of the same loop.  The pieces are computed by blocks of their
own, and combined by a second kernel; or by the rows of a tile, and combined after the loop.

Joined axes are those that tensors have side by side: one axis counts the elements of both, and a view of the tensor has it.
What reads them elsewhere, or in sums of indices, reads the quotients and remainders of the one axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from .expr import Axis, Scalar, Tensor, at, axis, const, plus, read, reached, rewrite, split, times
from .graph import Dim, Size
from .nest import REDUCTIONS, Nest, Pass, base_of, contraction, free_names, output_axes
from .rescale import NARROW, NEUTRAL, multiplied
from .text import unused


def over_blocks(nest: Nest, p: Pass, a: Axis, count: int, multiple: int) -> tuple[Nest, Nest] | None:
    """(kernel of partial results, kernel of the rest): about `count` pieces of multiples of indices; None: not possible."""
    n = a.extent
    if any(t.kind not in NEUTRAL or not set(t.axes) <= set(nest.axes) for t in p.stages):
        return None
    if isinstance(n, Dim) and any(contraction(t) is not None for t in p.stages):  # pieces would not be of whole tiles
        return None
    if isinstance(n, Dim):
        pieces, depth = count, (n + (count - 1)) // count
    else:
        depth = -(-n // (count * multiple)) * multiple
        pieces = -(-n // depth)
    if pieces < 2:
        return None
    taken = {x.name for s in nest.stages for x in (*s.axes, *s.over)} | {r.value.name for r in nest.global_reads()}
    piece, inner = Axis(unused("piece", taken), pieces), Axis(a.name, depth)
    found = _divided(nest, p, a, piece, inner if depth != 1 else None, plus(times(axis(piece), depth), axis(inner)))
    if found is None:
        return None
    own, limits = found
    stored = {s: Tensor(f"part_{s.name}", s.axes, s.dtype, "map") for t in p.stages for s in [own[t]]}
    kept = {x for t in p.stages for x in t.axes}
    first = Nest((piece, *(x for x in nest.axes if x in kept)), [(g, read(s)) for s, g in stored.items()],
                 [], limits)
    first.stages += _needed([x for s in nest.stages for x in (s, own.get(s)) if x is not None], first.outputs)
    return first, rest_of(nest, {}, _combined(p, {t: stored[own[t]] for t in p.stages}, piece), nest.limits)


def over_rows(nest: Nest, p: Pass, a: Axis, rows: int) -> tuple[Nest, Axis, Axis] | None:
    """(the nest, the loop's axis, the axis of rows): each row of a tile has a partial result, combined after the loop."""
    lane, inner = Axis(f"{a.name}_row", rows), Axis(a.name, (a.extent + rows - 1) // rows)
    found = _divided(nest, p, a, lane, inner, plus(times(axis(inner), rows), axis(lane)))
    if found is None:
        return None
    own, limits = found
    combined = _combined(p, own, lane)
    extremes: dict[Tensor, tuple[Tensor, Tensor]] = {}
    for t in (t for t in p.stages if t.kind.startswith("arg")):
        extremes[t] = _extremes(t, own, combined)
        best, of_all = extremes[t]
        here = Scalar("eq", (read(best), read(of_all)), "bool")
        index = at(plus(times(axis(inner), rows), axis(lane)), {inner: read(own[t])})
        body = Scalar("where", (here, index, const(2**31 - 1)), "int32")  # the first index that has the extreme
        combined[t] = replace(t, kind="min", body=body, over=(lane,))
    return rest_of(nest, own, combined, limits, extremes), inner, lane


def _extremes(t: Tensor, own: dict[Tensor, Tensor], combined: dict[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(the extreme of each piece, that of all) beside its index; those of the nest where it has them."""
    kind, body = t.kind.removeprefix("arg"), own[t].body
    for s, x in own.items():
        if x.kind == kind and x.body == body and x.over == own[t].over and s in combined:
            return x, combined[s]
    assert body is not None
    dtype = "float32" if body.dtype in NARROW else body.dtype
    best = Tensor(kind, own[t].axes, dtype, kind, body, own[t].over)
    return best, Tensor(kind, t.axes, dtype, kind, read(best), combined[t].over)


def in_halves(nest: Nest, t: Tensor, f: Scalar, other: Scalar, deep: Axis) -> tuple[Nest, Nest]:
    """(kernel that stores a float32 factor of a GEMM as two tensors of tf32 numbers, kernel of the rest).

    f, other: the factors.  deep: the axis along which the GEMM is looped over in tiles, the last one of the stored tensors.
    """
    axes = (*(a for a in t.over if a in f.axes and a is not deep), *(a for a in nest.axes if a in f.axes), deep)
    high = Scalar("tf32", (f,), f.dtype)
    low = Scalar("tf32", (Scalar("sub", (f, high), f.dtype),), f.dtype)
    stored = [(Tensor(name, axes, f.dtype, "map", attrs={"tf32": True}), e) for name, e in (("high", high), ("low", low))]
    both = Scalar("add", tuple(read(s) for s, _ in stored), f.dtype)
    made = replace(t, body=Scalar("mul", (other, both), f.dtype))
    return maps_of(stored), rest_of(nest, {}, {t: made}, nest.limits)


def maps_of(stored: list[tuple[Tensor, Scalar]], beside: Sequence[Axis] = ()) -> Nest:
    """The kernel that stores expressions of the same axes, whose names say nothing of others: so equal kernels are one.

    beside: axes that are joined.
    """
    names = free_names([stored[0][0], *(r.value for _, e in stored for r in e.reads)])
    axes = {a: Axis(next(names), a.extent) for a in stored[0][0].axes}
    made = Nest(tuple(axes.values()), [(t, at(e, {a: axis(x) for a, x in axes.items()})) for t, e in stored])
    return joined(made, tuple(axes[a] for a in beside)) if len(beside) > 1 else made


def are_halves(f: Scalar) -> bool:
    """Whether an operand of a GEMM is the sum of two tensors of tf32 numbers."""
    return f.op == "add" and all(x.op == "read" and "tf32" in x.value.attrs for x in f.args)


def _divided(nest: Nest, p: Pass, a: Axis, piece: Axis, inner: Axis | None, place: Scalar
             ) -> tuple[dict[Tensor, Tensor], dict[Axis, Scalar]] | None:
    """(stages of the pieces, limits of axes) of the stages of a pass and of what they read along its axis."""
    if any(t.kind.removeprefix("arg") not in NEUTRAL or inner is None and len(t.over) == 1 for t in p.stages):
        return None
    if any(s.kind not in REDUCTIONS and a in s.over for s in nest.stages):  # a scan: each element needs those in front
        return None
    where = place if inner is not None else axis(piece)
    own: dict[Tensor, Tensor] = {}
    moved: dict[Scalar, Scalar] = {}
    for s in nest.stages:
        if s not in p.stages and a not in s.axes:
            continue
        assert s.body is not None
        changed = {x: inner or piece if x is a else x for x in (*s.axes, *s.over)}
        axes = (piece, *(changed[x] for x in s.axes if changed[x] is not piece))
        over = tuple(changed[x] for x in s.over if changed[x] is not piece)
        body = at(rewrite(s.body, moved.get), {a: where})
        own[s] = replace(s, axes=axes, over=over, body=body)
        moved[read(s)] = read(own[s])
    limits = dict(nest.limits)
    if inner is not None and not (isinstance(piece.extent, int) and inner.extent * piece.extent == a.extent):
        limits[inner] = Scalar("lt", (place, const(a.extent)), "bool")
    if a in limits and inner is not None:
        outer = at(limits[a], {a: place})
        limits[inner] = Scalar("and", (outer, limits[inner]), "bool") if inner in limits else outer
    return own, limits


def _combined(p: Pass, own: Mapping[Tensor, Tensor], piece: Axis) -> dict[Tensor, Tensor]:
    """The reductions of a pass from those of its pieces."""
    out: dict[Tensor, Tensor] = {}
    for t in p.stages:
        body = read(own[t])
        if t in p.factors:
            reads = {read(p.old[s]): read(own[s]) for s in p.old} | {read(s): read(c) for s, c in out.items()}
            body = multiplied([(body, False), (rewrite(p.factors[t], reads.get), False)], body.dtype)
        out[t] = replace(t, body=body, over=(piece,))
    return out


def rest_of(nest: Nest, own: Mapping[Tensor, Tensor], combined: Mapping[Tensor, Tensor], limits: dict[Axis, Scalar],
          extremes: Mapping[Tensor, tuple[Tensor, Tensor]] = MappingProxyType({}),
          reads: Mapping[Scalar, Scalar] = MappingProxyType({})) -> Nest:
    """The nest with reductions of pieces in place of a pass, and with other reads."""
    new = dict(reads)
    stages: list[Tensor] = []
    for s in nest.stages:
        assert s.body is not None
        body = rewrite(s.body, new.get)
        t = combined[s] if s in combined else s if body == s.body else replace(s, body=body)
        stages += [x for x in (own.get(s), *extremes.get(s, ()), t) if x is not None and x not in stages]
        if t is not s:
            new[read(s)] = read(t)
    outputs = [(t, rewrite(e, new.get)) for t, e in nest.outputs]
    return Nest(nest.axes, outputs, _needed(stages, outputs), limits)


def _needed(stages: Iterable[Tensor], outputs: Iterable[tuple[Tensor, Scalar]]) -> list[Tensor]:
    """The stages that the outputs are computed from."""
    wanted = reached([r.value for _, e in outputs for r in e.reads],
                     lambda t: [r.value for r in t.body.reads] if t.body is not None else [])
    return [s for s in stages if s in wanted]


def shortened(nest: Nest) -> Nest:
    """The nest with views of what it reads, without last axes of one index."""
    new: dict[Scalar, Scalar] = {}
    views: dict[Tensor, Tensor] = {}
    for r in sorted(nest.global_reads(), key=repr):
        n = max((k + 1 for k, s in enumerate(r.value.shape) if s != 1), default=0)
        if 0 < n < len(r.args) and r.value.kind != "view":
            t = views.setdefault(r.value, replace(r.value, axes=r.value.axes[:n], kind="view", attrs={"base": r.value}))
            new[r] = read(t, r.args[:n])
    return rest_of(nest, {}, {}, nest.limits, reads=new) if new else nest


def joined(nest: Nest, group: tuple[Axis, ...]) -> Nest:
    """The nest with one axis for axes that stand side by side in its outputs; unchanged where a tensor has some of them."""
    whole = [t.axes for t in nest.stages] + [t.over for t in nest.stages] + [output_axes(nest, t) for t, _ in nest.outputs]
    if any(0 < len(set(axes) & set(group)) < len(group) for axes in whole):
        return nest
    extent: Size = 1
    for a in group:
        extent = extent * a.extent
    flat = Axis(group[-1].name, extent)
    digits: dict[Axis, Scalar] = {}
    left = axis(flat)
    for a in reversed(group):
        left, digits[a] = split(left, a.extent) if a is not group[0] else (left, left)
    views: dict[Tensor, Tensor] = {}
    stages: dict[Scalar, Scalar] = {}

    def beside(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(flat if a is group[0] else a for a in axes if a not in group[1:])

    def view(t: Tensor, k: int) -> Tensor:
        axes = (*t.axes[:k], flat, *t.axes[k + len(group):])
        return Tensor(t.name, axes, t.dtype, "view", attrs={**t.attrs, "base": base_of(t)})

    def change(x: Scalar) -> Scalar | None:
        if x.op == "axis":
            return digits.get(x.value)
        if x in stages:
            return stages[x]
        k = next((k for k, i in enumerate(x.args) if i == axis(group[0])), None) if x.op == "read" else None
        if k is None or x.args[k:k + len(group)] != tuple(map(axis, group)):
            return None
        if x.value not in views:
            views[x.value] = view(x.value, k)
        return read(views[x.value], (*(rewrite(i, change) for i in x.args[:k]), axis(flat),
                                     *(rewrite(i, change) for i in x.args[k + len(group):])))

    out = Nest(beside(nest.axes), limits=dict(nest.limits))
    for t in nest.stages:
        assert t.body is not None
        made = replace(t, axes=beside(t.axes), over=beside(t.over), body=rewrite(t.body, change))
        stages[read(t)] = read(made)
        out.stages.append(made)
    for t, e in nest.outputs:
        own = output_axes(nest, t)
        k = own.index(group[0]) if group[0] in own else None
        out.outputs.append((t if k is None else replace(view(t, k), axes=beside(own)), rewrite(e, change)))
    return out
