"""Tensors that kernels of their own store in another form, so that others copy tiles of them, or load whole vectors.

A factor of a GEMM may be stored with the axes of its tiles last.  Windows of a tensor are not stored, which would multiply its
elements: they are a matrix whose tiles TMA copies (T.im2col_matrix) from the tensor with the channels last.

    sum over (i, j, c) of  x[n, c, h * s + i, w * s + j] * v[o, c, i, j]    rows (n, h, w), columns (i, j, c)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .divide import maps_of, rest_of
from .expr import Axis, Scalar, Tensor, axis, conjuncts, const, linear, plus, read, rewrite, times
from .graph import Dim, Size, count_elements
from .nest import Contraction, Nest

STEP = 16  # of elements that tensor cores take: channels of a matrix of windows are multiples of it


def reordered(nest: Nest, t: Tensor, c: Contraction, windows: bool) -> Iterator[list[Nest]]:
    """Kernels in which tiles of a GEMM lie side by side in memory: its factors are stored with the axes of tiles last, the
    output is computed with rows and columns last and brought into its order by a kernel of its own; each of both, and both.

    windows: whether tiles of matrices of windows are copied.
    """
    sides = ((c.a, c.m), (c.b, c.n))
    batch = tuple(a for a in nest.axes if a not in (*c.m, *c.n))
    order = (*batch, *c.m, *c.n)
    found = [windows_of(nest, t, f, free) if windows else None for f, free in sides]
    w = next((x for x in found if x is not None), None)
    ways: list[tuple[list[Windows | None], tuple[Axis, ...]]] = [] if w is None else [(found, w.over)]
    if w is None or w.disjoint:
        ways.append(([None, None], t.over))
    for way, over in ways:
        first = [n for x in way if x is not None for n in x.first]
        changed = []
        for x, (f, free) in zip(way, sides):
            if x is None and _is_far(nest, f, over, free):
                axes = tuple(a for a in (*batch, *free, *over) if a in f.axes)
                made = Tensor("operand", axes, f.dtype, "map")
                plain = f.args[0] if f.op == "cast" and f.args[0].dtype == f.dtype else f
                first.append(maps_of([(made, plain)], [a for a in over[:-1] if a in axes] if w is not None else ()))
                changed.append(read(made))
            else:
                changed.append(f if x is None else read(x.matrix))
        rest = nest
        if changed != [c.a, c.b] and t.body is not None:
            body = Scalar("mul", tuple(changed), t.body.dtype)
            rest = rest_of(nest, {}, {t: replace(t, body=body, over=over)}, nest.limits)
            yield [*first, rest]
        if len(nest.outputs) == 1 and order != nest.axes and set(order) == set(nest.axes):
            (out, e), = rest.outputs
            result = Tensor("result", order, out.dtype, "map")
            yield [*first, Nest(order, [(result, e)], rest.stages, rest.limits), Nest(nest.axes, [(out, read(result))])]


def _is_far(nest: Nest, f: Scalar, over: tuple[Axis, ...], free: tuple[Axis, ...]) -> bool:
    """Whether tiles of a factor that no stage computes are no neighbours in memory: its last axis is that of another GEMM, or
    not the last one of the sum, or indices are sums or multiples of axes."""
    last = {i[-1] for r in f.reads for i in [[i for i in r.args if i.axes]] if i}
    if not last or any(r.value in nest.stages for r in f.reads):
        return False
    ways = [[(x, n) for x, n in linear(i)[0].items() if not x.axes.isdisjoint((*over, *free))] for r in f.reads for i in r.args]
    return all(i.axes.isdisjoint((*over[-1:], *free)) for i in last) or any(
        len(w) > 1 or x.op != "axis" or n != 1 for w in ways for x, n in w)


def beside_last(nest: Nest) -> list[Nest]:
    """Kernels that store what others read along their last axis in steps, with that axis last, and the kernel of the rest."""
    last, new, first = nest.axes[-1] if nest.axes else None, dict[Scalar, Scalar](), list[Nest]()
    for r in sorted(nest.global_reads(), key=repr):
        if last in r.axes and last not in r.args[-1].axes and all(i.op == "axis" for i in r.args if i.axes):
            axes = (*(a for a in r.axes if a not in nest.axes), *(a for a in nest.axes if a in r.axes))
            made = Tensor("operand", axes, r.dtype, "map")
            first.append(maps_of([(made, r)]))
            new[r] = read(made)
    return [*first, rest_of(nest, {}, {}, nest.limits, reads=new)] if new else []


@dataclass(frozen=True)
class Windows:
    """A factor of a GEMM as a matrix of windows: rows are places of windows, columns (place in a window, channel).

    first: the kernel that stores the tensor with the channels last; none where it lies so.  over: the summed axes in the order
    of the columns.  matrix: a view of that tensor, with an axis for each digit of a row and of a column.
    disjoint: whether no element is in two windows.
    """

    first: tuple[Nest, ...]
    over: tuple[Axis, ...]
    matrix: Tensor
    disjoint: bool


def windows_of(nest: Nest, t: Tensor, f: Scalar, free: tuple[Axis, ...]) -> Windows | None:
    """The matrix of windows that a factor is: one element, or 0 outside of the tensor, at multiples of places plus multiples of
    steps along one or two axes, and at one plain summed axis.  None for all else."""
    e, tests = f.args[0] if f.op == "cast" else f, list[Scalar]()
    if e.op == "where" and e.args[2].op == "const" and e.args[2].value == 0:
        e, tests = e.args[1], conjuncts(e.args[0])
    found = {(i, r.value.axes[k].extent) for r in e.reads for k, i in enumerate(r.args) if not i.axes.isdisjoint(t.over) or
             not i.axes.isdisjoint(free) and i.op != "axis"}
    order = [*nest.axes, *t.over]
    moved = sorted((i for i, _ in found if not i.axes.isdisjoint(free)), key=lambda i: min(order.index(a) for a in i.axes))
    deep = [i for i, _ in found if i.axes.isdisjoint(free)]
    channel = _channel(deep[0], t.over) if len(deep) == 1 else None
    computed = any(r.value in nest.stages for r in f.reads)
    if channel is None or not 1 <= len(moved) <= 2 or len(set(moved)) < len(moved) or computed:
        return None
    group, c = channel
    ways = [_along(i, dict(found)[i], t.over, tests) for i in moved]
    if any(w is None for w in ways):
        return None
    sides = [w for w in ways if w is not None]
    bounds = {Scalar(op, (i, const(n)), "bool") for i, s in zip(moved, sides) for op, n in (("ge", 0), ("lt", s.size))}
    rows, taps = tuple(s.row for s in sides), tuple(a for s in sides for a in s.tap)
    lie = [Axis(x, s.size) for x, s in zip("hw", sides)]
    value = rewrite(e, dict(zip(moved, map(axis, lie))).get)
    images = tuple(a for a in nest.axes if a in value.axes and a not in (*rows, *group))
    if not bounds.issuperset(tests) or not value.axes <= {*images, *lie, *group, c} or {*taps, c} != set(t.over):
        return None
    lies = value.op == "read" and value.dtype == f.dtype and value.args == (*map(axis, (*images, *lie)), deep[0])
    made = value.value if lies else Tensor("operand", (*images, *lie, *group, c), f.dtype, "map")
    value = value if value.dtype == f.dtype else Scalar("cast", (value,), f.dtype)
    sides = sides if len(sides) == 2 else [_Side(rows[0], (), 1, 1, 1, 1, (0, 0)), *sides]
    attrs = {"base": made, "channels": c.extent, "rows": count_elements(a.extent for a in (*images, *rows)),
             "image": (count_elements(a.extent for a in images), *(s.size for s in sides),
                       count_elements(a.extent for a in (*group, c))),
             "steps": tuple(zip(*((s.kernel, s.stride, s.dilation, s.pad) for s in sides)))}
    matrix = Tensor("windows", (*images, *rows, *taps, *group, c), f.dtype, "view", attrs=attrs)
    first = () if lies else (maps_of([(made, value)], lie),)
    return Windows(first, (*taps, c), matrix, all(s.kernel <= s.stride for s in sides))


def _channel(i: Scalar, over: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], Axis] | None:
    """(the axis of groups, if any, the summed axis) of an index that counts channels, those of a group side by side."""
    axes = [x.value for x in linear(i)[0] if x.op == "axis"]
    c, group = next((a for a in axes if a in over), None), tuple(a for a in axes if a not in over)
    if c is None or isinstance(c.extent, Dim) or c.extent % STEP or len(group) > 1:
        return None
    return (group, c) if i == (plus(times(axis(group[0]), c.extent), axis(c)) if group else axis(c)) else None


@dataclass(frozen=True)
class _Side:
    """Windows along one axis of a tensor of so many elements.  row: counts windows.  tap: the elements of one, if several."""

    row: Axis
    tap: tuple[Axis, ...]
    size: int
    kernel: int
    stride: int
    dilation: int
    pad: tuple[int, int]


def _along(i: Scalar, size: Size, over: tuple[Axis, ...], tests: list[Scalar]) -> _Side | None:
    """The windows that an index of an axis with so many elements counts; None where it may be outside without a test of it."""
    terms, low = linear(i)
    row = tuple(x.value for x in terms if x.op == "axis" and x.value not in over)
    tap = tuple(x.value for x in terms if x.op == "axis" and x.value in over)
    numbers = [*terms.values(), low, size, *(a.extent for a in (*row, *tap))]
    if len(row) != 1 or len(tap) > 1 or len(row) + len(tap) != len(terms) or any(isinstance(n, Dim) for n in numbers):
        return None
    stride, dilation = (terms[axis(a[0])] if a else 1 for a in (row, tap))
    kernel = tap[0].extent if tap else 1
    end = (row[0].extent - 1) * stride + dilation * (kernel - 1) + 1 - size + low  # type: ignore[operator]
    known = {(x.op, *x.args) for x in tests}
    outside = low < 0 and ("ge", i, const(0)) not in known or end > 0 and ("lt", i, const(size)) not in known
    if stride < 1 or dilation < 1 or outside:  # type: ignore[operator]
        return None
    return _Side(row[0], tap, size, kernel, stride, dilation, (-low, end))  # type: ignore[arg-type, operator]
