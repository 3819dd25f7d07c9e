"""Functions of whole tensors: element-wise, reductions, scans, orders, shapes, gathers, contractions.

Those whose first parameter is `x` are methods of tensors too: T.exp(x) is x.exp().
"""

from __future__ import annotations

import operator
import string
from collections.abc import Callable, Sequence
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import dtype
from tilelang.ir.dtype import promote
from tilelang.language.tensor import dtype_of

from .graph import Dim, Size, count_elements, text_of
from .tensor import (F32, I32, METHODS, Tensor, axes_of, axis_of, broadcast_shapes, converted, described, elementwise, guard,
                     make, matched, operand, public, sized, tensor, weak, what, wrong_type)

register("program-einsum", ValueError, "T.einsum is given a specification that does not fit its tensors",
         'write one letter for each axis: T.einsum("bhqd,bhkd->bhqk", q, k)')
register("program-reshape", ValueError, "a reshape changes the number of elements",
         "the number of elements stays; -1 stands for one size that follows from the others")
register("program-gather", TypeError, "a gather is given indices that are no integers, or of another rank",
         "indices are tensors of int32 or int64; compare with T.where for masks")
register("program-windows", ValueError, "windows do not fit the tensor", "pad the tensor, or take smaller windows")

MOST_FACTORS = 8  # greatest exponent that is written as multiplications

# ---- element-wise ----------------------------------------------------------------------------------------------------

ONE_OPERAND = {  # names in T, the operation first -> what it gives
    "exp": "e ** x", "exp2": "2 ** x", "log": "natural logarithm", "log2": "logarithm to base 2", "log1p": "log(1 + x)",
    "expm1": "exp(x) - 1", "sqrt": "square root", "rsqrt": "1 / sqrt(x)", "sin": "sine", "cos": "cosine",
    "tan": "tangent", "tanh": "hyperbolic tangent", "erf": "error function", "sigmoid": "1 / (1 + exp(-x))",
    "floor": "The greatest integer that is not above each element.",
    "ceil": "The least integer that is not below each element.",
    "trunc": "Each element without its fraction.", "round nearbyint": "The nearest integer, ties to even.",
    "abs fabs": "Absolute value.", "sign": "-1, 0 or 1; NaN stays.", "isnan": "Whether each element is NaN, as bool.",
    "isinf": "Whether each element is infinite, as bool.",
    "isfinite": "Whether each element is neither infinite nor NaN, as bool.",
    "logical_not bitwise_not": "The negation of bools; the complement of the bits of integers.",
}
TWO_OPERANDS = {
    "atan2": "The angle of (b, a).", "floordiv": "a / b rounded down.",
    "floormod remainder": "a - b * floor(a / b), with the sign of b.",
    "logical_and bitwise_and": "Both; the bits of integers.", "logical_or bitwise_or": "One or both; the bits of integers.",
    "logical_xor bitwise_xor": "One but not both; the bits of integers.", "shift_left": "a << b.", "shift_right": "a >> b.",
    "maximum": "The greater of two elements; if one is NaN, the other.",
    "minimum": "The lesser of two elements; if one is NaN, the other.",
}
OPERATIONS = {"floormod": "mod", "shift_left": "shl", "shift_right": "shr", "maximum": "max", "minimum": "min",
              **{f"logical_{op}": op for op in ("not", "and", "or", "xor")}}  # of functions with another name


def named(fn: Callable[..., Tensor], names: str, about: str) -> Callable[..., Tensor]:
    """A function of a table with its names and its docstring, made public."""
    name, *also = names.split()
    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = about if about.endswith(".") else f"{about}, of each element, in the type of x (integers: float32)."
    return public(*also)(fn)


def _elementwise_function(names: str, about: str, operands: int) -> None:
    name = names.split()[0]
    op = OPERATIONS.get(name, name)

    def of_one(x: Any) -> Tensor:
        return elementwise(op, x)

    def of_two(a: Any, b: Any) -> Tensor:
        return elementwise(op, a, b)

    named(of_one if operands == 1 else of_two, names, about)


for _names, _about in ONE_OPERAND.items():
    _elementwise_function(_names, _about, 1)
for _names, _about in TWO_OPERANDS.items():
    _elementwise_function(_names, _about, 2)


@public("pow")
def power(a: Any, b: Any) -> Tensor:
    """a ** b; integer exponents up to 8 are multiplications, 0.5 and -0.5 roots."""
    if isinstance(a, Tensor) and isinstance(b, int) and not isinstance(b, bool) and 1 <= b <= MOST_FACTORS:
        out, factor = None, a
        while b:
            if b & 1:
                out = factor if out is None else out * factor
            b >>= 1
            factor = factor * factor if b else factor
        assert out is not None
        return out
    if isinstance(a, Tensor) and isinstance(b, float) and abs(b) == 0.5:
        return elementwise("sqrt" if b > 0 else "rsqrt", a)
    if isinstance(b, float) or isinstance(b, int) and b < 0:
        a = tensor(a)
        a = a if a.dtype.is_float else converted(a, F32)
    return elementwise("pow", a, b)


def _of_two_or_axes(kind: str, word: str, extreme: str) -> None:
    def fn(a: Any, b: Any = None, *, axis: Any = None, keepdims: bool = False) -> Tensor:
        if b is not None and (axis is not None or keepdims):
            raise TypeError("an axis is given beside two tensors")
        return reduced(kind, tensor(a), axis, keepdims) if b is None else elementwise(kind, a, b)

    named(fn, kind, f"The {word} of two elements; with one tensor, the {extreme} along axes.  If one is NaN, the other.")


_of_two_or_axes("max", "greater", "greatest")
_of_two_or_axes("min", "lesser", "least")


@public("clip")
def clamp(x: Any, min_val: Any = None, max_val: Any = None) -> Tensor:
    """min(max(x, min_val), max_val)."""
    x = x if min_val is None else elementwise("max", x, min_val)
    return x if max_val is None else elementwise("min", x, max_val)


@public("if_then_else")
def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition is true, else b; shapes broadcast, types are promoted."""
    c, (a, b) = tensor(condition), matched(a, b)
    if not c.dtype.is_bool:
        raise error("program-type", f"T.where chooses by a tensor of bool, found {c.dtype}", expected="a comparison, or bool",
                    hint="compare: T.where(x != 0, a, b)")
    return make("where", c, a, b, shape=broadcast_shapes(c.shape, a.shape, b.shape), dt=a.dtype)


@public("astype", "to")
def cast(x: Any, dtype: Any) -> Tensor:
    """Convert to another type: to integers truncating, saturating, NaN to 0; to narrower floats rounding to nearest even."""
    return converted(x, dtype_of(dtype, "T.cast"))


# ---- reductions, scans, orders ---------------------------------------------------------------------------------------

def accumulator(dt: dtype, kind: str = "sum") -> dtype:
    """The type of the accumulator of a type: float32 for narrower floats, int32 for narrower integers."""
    if kind not in ("sum", "prod") or dt.bits >= 32 and not dt.is_bool:
        return dt
    return F32 if dt.is_float else I32


def without(x: Tensor, axes: Sequence[int], keepdims: bool) -> tuple[Size, ...]:
    """The shape of a reduction over axes."""
    return tuple(1 if k in axes else s for k, s in enumerate(x.shape) if keepdims or k not in axes)


def reduced(kind: str, x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    """A reduction of a tensor over axes, all where axis is None."""
    if x.dtype.is_bool != (kind in ("any", "all")) and kind not in ("sum", "prod"):
        raise wrong_type("numbers" if x.dtype.is_bool else "bool: compare first, x != 0", x.dtype)
    x = x if x.dtype.is_float else converted(x, accumulator(x.dtype, kind))
    axes = axes_of(x, axis)
    return make("reduce", x, shape=without(x, axes, keepdims), kind=kind, axes=axes, keepdims=bool(keepdims),
                accum=accumulator(x.dtype, kind)) if axes else x


def _reduction(kind: str, names: str, about: str) -> Callable[..., Tensor]:
    def fn(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        return reduced(kind, x, axis, keepdims)

    return named(fn, names, f"{about}  axis: an integer or several, None for all; keepdims: keep them with extent 1.")


_reduction("sum", "sum reduce_sum", "The sum; 16-bit floats are added in float32, narrow integers in int32; 0 of no element.")
_reduction("prod", "prod", "The elements multiplied; 1 of no element.")
_reduction("any", "any", "Whether one is true.")
_reduction("all", "all", "Whether all are true.")
METHODS.update(max=_reduction(
    "max", "reduce_max amax", "The greatest element that is not NaN; the least value of the type of no element."))
METHODS.update(min=_reduction(
    "min", "reduce_min amin", "The least element that is not NaN; the greatest value of the type of no element."))


def _count(x: Tensor, axis: Any) -> Size:
    """The number of elements along axes."""
    return count_elements(x.shape[a] for a in axes_of(x, axis))


@public(in_float32=True)
def mean(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The mean, computed in float32 (float64 for float64), in the type of x; integers: float32.  NaN of no element."""
    return x.sum(axis, keepdims) / _count(x, axis)  # type: ignore[no-any-return]


@public("variance", in_float32=True)
def var(x: Any, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """The mean of squared distances from the mean; ddof: subtracted from the count."""
    d = x - x.mean(axis, True)
    return (d * d).sum(axis, keepdims) / (_count(x, axis) - ddof)  # type: ignore[no-any-return]


@public(in_float32=True)
def std(x: Any, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """The square root of the variance."""
    return x.var(axis, keepdims, ddof).sqrt()  # type: ignore[no-any-return]


def _extreme(kind: str) -> None:
    def fn(x: Any, axis: int = -1, keepdims: bool = False) -> Tensor:
        at = axis_of(x, axis)
        return make("reduce", x, shape=without(x, (at,), keepdims), dt=I32, kind=f"arg{kind}", axes=(at,),
                    keepdims=bool(keepdims), accum=I32)

    named(fn, f"arg{kind}", f"int32: where along an axis the {kind}imum stands, the first of equal ones; NaN is passed over.")


def _scan(kind: str) -> None:
    def fn(x: Any, axis: int = -1, reverse: bool = False, *, dim: int | None = None) -> Tensor:
        x = x if x.dtype.is_float else converted(x, accumulator(x.dtype, kind))
        return make("scan", x, kind=kind, axis=axis_of(x, axis if dim is None else dim), reverse=bool(reverse),
                    accum=accumulator(x.dtype, kind))

    named(fn, f"cum{kind}", f"The {kind} of the elements up to each one along an axis; reverse: from each one on.")


for _kind in ("max", "min"):
    _extreme(_kind)
for _kind in ("sum", "prod", "max", "min"):
    _scan(_kind)


@public()
def argsort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """int32: the order of the elements along an axis; equal ones keep theirs, NaN comes last."""
    at = axis_of(x, axis)
    return make("order", x, dt=I32, axis=at, k=x.shape[at], largest=bool(descending))


@public()
def sort(x: Any, axis: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """(elements in order along an axis, their int32 indices)."""
    order = argsort(x, axis, descending)
    return take_along(x, order, axis), order


@public()
def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """(the k greatest or least elements along an axis, best first, their int32 indices).  k: a number up to the extent."""
    at = axis_of(x, axis)
    extent = x.shape[at]
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or isinstance(extent, int) and k > extent:
        raise error("program-data-shape" if isinstance(k, Tensor) else "program-axis", f"T.topk takes ‹{described(k)}› of "
                    f"{extent} elements", expected=f"a number from 1 to {extent}", hint="give k as a Python number")
    shape = (*x.shape[:at], k, *x.shape[at + 1:])
    order = make("order", x, shape=shape, dt=I32, axis=at, k=k, largest=bool(largest))
    return take_along(x, order, at), order


# ---- shapes ----------------------------------------------------------------------------------------------------------

def sizes_given(given: Any, least: int = 0) -> tuple[Any, ...]:
    """Sizes that are given one by one or as a tuple.  least: -1 where one size may be left open."""
    shape = tuple(map(sized, given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given))
    for s in shape:
        if isinstance(s, int) and s < least:
            raise error("program-reshape", f"{what()} is given the size ‹{s}›", expected=f"sizes of {max(least, 0)} and more",
                        hint="sizes follow from shapes: x.shape[0]")
        if isinstance(s, bool) or not isinstance(s, (int, Dim)):
            raise error("program-data-shape" if isinstance(s, Tensor) else "program-reshape", f"{what()} is given "
                        f"‹{described(s)}› as a size", expected="integers, or sizes of tensors",
                        hint="sizes follow from shapes: x.shape[0]")
        guard(s, "a size") if isinstance(s, Dim) else None
    return shape


@public("view")
def reshape(x: Any, *shape: Any) -> Tensor:
    """The elements, in row-major order, in another shape; one size may be -1."""
    want, count = list(sizes_given(shape, -1)), count_elements(x.shape)
    if want.count(-1) == 1 and (known := count_elements(s for s in want if s != -1)) != 0:
        want[want.index(-1)] = count // known
    if count_elements(want) != count:
        raise error("program-reshape", f"{text_of(x.shape)} cannot be reshaped to {text_of(want)}",
                    expected=f"{count} elements", found=f"{count_elements(want)} elements")
    return x if tuple(want) == x.shape else make("reshape", x, shape=want)


@public("permute")
def transpose(x: Any, *axes: Any) -> Tensor:
    """The tensor with its axes in another order: all of them are named, or none for the reverse order."""
    given = tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    order = tuple(range(x.ndim))
    perm = tuple(axis_of(x, a) for a in given) if given else order[::-1]
    if tuple(sorted(perm)) != order:
        raise error("program-axis", f"T.transpose of {x.ndim} axes names {given}", expected=f"each of {x.ndim} axes once",
                    found=repr(given), hint="T.swapaxes(x, a, b) exchanges two axes")
    return x if perm == order else make("transpose", x, shape=[x.shape[k] for k in perm], perm=perm)


@public()
def swapaxes(x: Any, a: int, b: int) -> Tensor:
    """The tensor with two axes exchanged."""
    perm, i, j = list(range(x.ndim)), axis_of(x, a), axis_of(x, b)
    perm[i], perm[j] = j, i
    return transpose(x, perm)


def moved(x: Tensor, axis: int, to: int) -> Tensor:
    """The tensor with an axis at another place; the others keep their order."""
    order = [k for k in range(x.ndim) if k != axis]
    order.insert(to, axis)
    return transpose(x, order)


@public("expand_dims")
def unsqueeze(x: Any, axis: int) -> Tensor:
    """The tensor with a further axis of extent 1, which stands at `axis` of the result."""
    at = axis_of(x.ndim + 1, axis)
    return reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


@public()
def squeeze(x: Any, axis: Any = None) -> Tensor:
    """The tensor without axes of extent 1: those named, or all."""
    gone = [k for k, s in enumerate(x.shape) if s == 1] if axis is None else axes_of(x, axis)
    return reshape(x, without(x, gone, False))


@public()
def flatten(x: Any, start: int = 0, end: int = -1) -> Tensor:
    """The axes from start to end as one."""
    a, b = axis_of(x, start), axis_of(x, end)
    if b < a:
        raise error("program-axis", f"T.flatten from axis {a} to axis ‹{b}›", expected=f"an end from axis {a} on")
    return reshape(x, (*x.shape[:a], count_elements(x.shape[a:b + 1]), *x.shape[b + 1:]))


@public("expand")
def broadcast_to(x: Any, *shape: Any) -> Tensor:
    """The tensor repeated to a shape, by NumPy's rule."""
    want = sizes_given(shape)
    if broadcast_shapes(x.shape, want) != want:
        raise error("program-shape", f"{text_of(x.shape)} does not broadcast to ‹{text_of(want)}›",
                    expected=f"a shape that {text_of(x.shape)} broadcasts to")
    return x if want == x.shape else make("broadcast", x, shape=want)


def _joined(xs: Any) -> list[Tensor]:
    """The tensors of a list, in their common type."""
    if isinstance(xs, Tensor) or not isinstance(xs, (tuple, list)) or not xs:
        raise error("program-operand", f"{what()} joins a list of tensors, found {described(xs)}",
                    expected="a list or tuple of tensors", hint=f"write {what()}([a, b])")
    return matched(*xs)


@public("concatenate", "cat")
def concat(xs: Any, axis: int = 0) -> Tensor:
    """Tensors joined along an axis; the other extents are equal, types are promoted."""
    first, *others = tensors = _joined(xs)
    at = axis_of(first, axis)
    total = first.shape[at]
    for x in others:
        if x.ndim != first.ndim or without(x, (at,), False) != without(first, (at,), False):
            raise error("program-shape", f"{text_of(first.shape)} and ‹{text_of(x.shape)}› cannot be joined along axis {at}",
                        expected="equal extents along the other axes")
        total = total + x.shape[at]
    return make("concat", *tensors, shape=(*first.shape[:at], total, *first.shape[at + 1:]), axis=at)


@public()
def stack(xs: Any, axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis."""
    return concat([unsqueeze(x, axis) for x in _joined(xs)], axis)


def at_axis(x: Tensor, axis: int, index: Any) -> Tensor:
    """x[..., index, ...]: the index stands at an axis."""
    return x[(slice(None),) * (axis % x.ndim) + (index,)]


@public("chunk")
def split(x: Any, pieces: int, axis: int = -1) -> tuple[Tensor, ...]:
    """The tensor cut into a number of equal pieces along an axis."""
    at = axis_of(x, axis)
    size = x.shape[at]
    if not isinstance(pieces, int) or pieces < 1 or size % pieces != 0:
        raise error("program-shape", f"an axis of extent {size} is cut into ‹{pieces} pieces›", expected=f"a divisor of {size}")
    piece = size // pieces
    return tuple(at_axis(x, at, slice(k * piece, (k + 1) * piece)) for k in range(pieces))


@public()
def pad(x: Any, widths: Any, value: Any = 0) -> Tensor:
    """The tensor with elements of a value before and after: a pair of numbers for each axis, or for the last ones."""
    pairs = [tuple(w) for w in ((widths,) if isinstance(widths[0], int) else widths)]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if len(pairs) != x.ndim or any(len(p) != 2 or not all(isinstance(w, int) and w >= 0 for w in p) for p in pairs):
        raise error("program-shape", f"T.pad of {text_of(x.shape)} by ‹{widths!r}›", expected="a pair of numbers for each axis",
                    hint="write T.pad(x, [(before, after), ...])")
    filler = converted(weak(operand(value), x.dtype), x.dtype).node
    if filler.op != "constant":
        raise error("program-operand", f"T.pad of {x.dtype} is given ‹{described(value)}›", expected=f"a number of {x.dtype}",
                    hint="convert the tensor first, or join tensors by T.concat")
    shape = [before + s + after for s, (before, after) in zip(x.shape, pairs)]
    return make("pad", x, shape=shape, before=tuple(p[0] for p in pairs), after=tuple(p[1] for p in pairs),
                value=filler.attrs["value"])


@public()
def flip(x: Any, axis: Any = None) -> Tensor:
    """The tensor with the order of its elements reversed along axes."""
    axes = axes_of(x, axis)
    return x[tuple(slice(None, None, -1 if k in axes else None) for k in range(x.ndim))]  # type: ignore[no-any-return]


@public()
def roll(x: Any, shift: int, axis: int = -1) -> Tensor:
    """The elements moved along an axis by a number of places; those that leave the end come in at the start."""
    at = axis_of(x, axis)
    extent = operator.index(x.shape[at])
    by = shift % extent
    return concat([at_axis(x, at, slice(extent - by, extent)), at_axis(x, at, slice(0, extent - by))], at) if by else x


@public()
def windows(x: Any, sizes: Any, axes: Any, strides: Any = 1, dilations: Any = 1) -> Tensor:
    """Overlapping windows along axes, which then count positions; the axes of a window stand at the end."""
    at = tuple(axis_of(x, a) for a in (axes if isinstance(axes, (tuple, list)) else (axes,)))
    sizes, strides, dilations = (tuple(v) if isinstance(v, (tuple, list)) else (v,) * len(at)
                                 for v in (sizes, strides, dilations))
    if any(not isinstance(v, int) or v < 1 for v in (*sizes, *strides, *dilations)):
        raise error("program-windows", f"windows of {sizes} with the strides {strides} and dilations {dilations}",
                    expected="numbers from 1 on", found=f"{sizes}, {strides}, {dilations}")
    for axis, size, stride, dilation in zip(at, sizes, strides, dilations):
        extent, span = x.shape[axis], (size - 1) * dilation + 1
        if isinstance(extent, int) and extent < span:
            raise error("program-windows", f"windows of ‹{span}› elements do not fit {extent} along axis {axis}",
                        expected=f"at most {extent} elements")
        count = guard((extent - span) // stride + 1, "a window")
        places = unsqueeze(iota(count) * stride, 1) + iota(size) * dilation
        x = moved(gather(x, places, axis), axis + 1, x.ndim)
    return x  # type: ignore[no-any-return]


# ---- made from sizes -------------------------------------------------------------------------------------------------

@public("arange")
def iota(*shape: Any, axis: int = 0) -> Tensor:
    """int32: the index along an axis, of a tensor of a shape; T.iota(n) is 0, 1, ..., n - 1."""
    want = sizes_given(shape)
    return make("iota", shape=want, dt=I32, axis=axis_of(len(want), axis))


@public()
def full(shape: Any, value: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of one value."""
    return broadcast_to(converted(tensor(value), dtype_of(dtype, what())), sizes_given((shape,)))


@public()
def zeros(shape: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype)


@public()
def ones(shape: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of ones."""
    return full(shape, 1, dtype)


@public()
def zeros_like(x: Any) -> Tensor:
    """Zeros of the shape and type of a tensor."""
    return full(x.shape, 0, x.dtype)


# ---- gathers ---------------------------------------------------------------------------------------------------------

def _indices(index: Any) -> Tensor:
    i = tensor(index)
    if not i.dtype.is_int:
        raise error("program-gather", f"{what()} takes «integers» as indices, found {i.dtype}")
    return i


@public("take")
def gather(x: Any, index: Any, axis: int = 0) -> Tensor:
    """Slices of x at integer indices along an axis: the axes of the index stand in its place.  Indices count from 0."""
    i, at = _indices(index), axis_of(x, axis)
    return make("gather", x, i, shape=(*x.shape[:at], *i.shape, *x.shape[at + 1:]), axis=at)


@public("take_along_axis")
def take_along(x: Any, index: Any, axis: int = -1) -> Tensor:
    """Elements of x at integer indices along an axis; the index has the shape of x, but for that axis."""
    i, at = _indices(index), axis_of(x, axis)
    if x.ndim != i.ndim or without(x, (at,), False) != without(i, (at,), False):
        raise error("program-gather", f"T.take_along: indices ‹{text_of(i.shape)}› do not fit {text_of(x.shape)}",
                    expected=f"the shape of the tensor, but for axis {at}")
    return make("take_along", x, i, shape=i.shape, axis=at)


@public()
def one_hot(x: Any, classes: int, dtype: Any = "float32") -> Tensor:
    """1 where the index along a new last axis is the element, else 0."""
    return cast(unsqueeze(_indices(x), -1) == iota(classes), dtype)


# ---- contractions ----------------------------------------------------------------------------------------------------

def _specification(spec: Any, ranks: Sequence[int]) -> str:
    """A specification with "..." written out.  Raises program-einsum."""
    said, count = repr(spec), len(ranks)

    def wrong(expected: str, found: str = said) -> Exception:
        return error("program-einsum", f"T.einsum: {found} does not fit {count} tensor{'s' if count != 1 else ''}",
                     expected=expected, found=said)

    if not isinstance(spec, str) or spec.count("->") != 1:
        raise wrong('a text like "mk,kn->mn"')
    left, right = spec.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != count:
        raise wrong(f"{len(terms)} tensors for {len(terms)} terms")
    spare = [c for c in string.ascii_uppercase if c not in spec]
    further = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks)]
    most = max((n for t, n in zip(terms, further) if "..." in t), default=0)
    filled = []
    for term, rank, many in zip(terms, ranks, further):
        if many < 0 or many and "..." not in term:
            raise wrong(f"{rank} letters for an axis each", f'the term "{term}" of {said}')
        filled.append(term.replace("...", "".join(spare[most - many:most])))
    right = right.replace("...", "".join(spare[:most]))
    for term in (*filled, right):
        if len(set(term)) != len(term) or not term.isalpha() and term:
            raise wrong("each letter once in a term", f'the term "{term}" of {said}')
    if not set(right) <= set("".join(filled)):
        raise wrong("letters of the operands in the result", f'the result "{right}" of {said}')
    return f"{','.join(filled)}->{right}"


@public()
def einsum(spec: str, *xs: Any, dtype: Any = None) -> Tensor:
    """Sums over named indices: T.einsum("mk,kn->mn", a, b) is a @ b.

    spec: one letter for each axis; letters that the result lacks are summed over; "..." stands for further axes.  Operands
    are promoted to one type.  Sums are formed in float32 for narrower floats, int32 for narrower integers; dtype: of the
    result, else that of the operands (float32 for 8-bit floats, the accumulator's for integers).
    """
    tensors = matched(*xs)
    text = _specification(spec, [x.ndim for x in tensors])
    t = tensors[0].dtype
    if t.is_bool:
        raise wrong_type("numbers", t)
    sizes: dict[str, Size] = {}
    for letters, x in zip(text.split("->")[0].split(","), tensors):
        for letter, size in zip(letters, x.shape):
            if (first := sizes.setdefault(letter, size)) != size:
                raise error("program-einsum", f'"{text}": the axis {letter} has the extents {first} and {size}',
                            expected="one extent for each letter", found=f"{first} and {size}",
                            hint="the shapes are " + ", ".join(text_of(x.shape) for x in tensors))
    accum = accumulator(t)
    own = t if t.is_float and t.bits >= 16 else accum
    want = own if dtype is None else dtype_of(dtype, "T.einsum")
    accum = promote(accum, want) if want.is_float == accum.is_float else accum
    shape = [sizes[letter] for letter in text.split("->")[1]]
    return converted(make("einsum", *tensors, shape=shape, dt=own if want == own else accum, spec=text, accum=accum), want)


@public("dot")
def matmul(a: Any, b: Any, dtype: Any = None) -> Tensor:
    """a @ b as in NumPy: over the last axis of a and the last but one of b, the others are batches that broadcast.

    The sum is formed in float32 for narrower floats.  dtype: of the result, as in T.einsum.
    """
    x, y = matched(a, b)
    if not x.shape or not y.shape:
        raise error("program-shape", "@ needs tensors with axes", expected="at least one axis each",
                    found=f"{text_of(x.shape)} and {text_of(y.shape)}")
    inner = x.shape[-1], y.shape[0 if y.ndim == 1 else -2]
    if inner[0] != inner[1]:
        raise error("program-shape", f"{text_of(x.shape)} @ {text_of(y.shape)}: the inner extents differ",
                    expected=f"{inner[0]} rows on the right", found=str(inner[1]))
    m, n = ("m" if x.ndim > 1 else ""), ("n" if y.ndim > 1 else "")
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    letters = "abcdefghijlopqrstuvwxyz"[:len(batch)]  # for axes of batches: without m, n and k
    terms, operands = [], []
    for t, own in ((x, m + "k"), (y, "k" + n)):
        lead = t.shape[:-2]
        first = len(batch) - len(lead)
        kept = [k for k, s in enumerate(lead) if s == batch[first + k]]  # the others have extent 1: they repeat
        terms.append("".join(letters[first + k] for k in kept) + own)
        operands.append(reshape(t, (*(lead[k] for k in kept), *t.shape[len(lead):])))
    return einsum(f"{terms[0]},{terms[1]}->{letters}{m}{n}", *operands, dtype=dtype)


__all__ = ["argsort", "broadcast_to", "concat", "einsum", "flatten", "full", "iota", "matmul", "mean", "one_hot", "ones",
           "pad", "power", "roll", "sort", "split", "squeeze", "stack", "std", "swapaxes", "take_along", "topk", "unsqueeze",
           "windows", "zeros", "zeros_like"]
