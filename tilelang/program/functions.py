"""Functions of whole tensors: element-wise, reductions, scans, orders, shapes, gathers, contractions.

All but `iota`, `full` and its relatives take a tensor first and are methods of tensors too: T.exp(x) is x.exp().
"""

from __future__ import annotations

import builtins
import string
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from tilelang.errors import error
from tilelang.ir import dtype
from tilelang.ir.dtype import promote

from .graph import Dim, Node, Size, count_elements
from .ops.rules import F32, F64, I32, axis_of, broadcast_shapes, text_of, wrong_type
from .tensor import (METHODS, Tensor, axes_of, converted, described, elementwise, floating, guard, here, make, matched,
                     node_of, operand, power, public, type_named, weak)

MOST_INTS = 32  # bits of sums of narrower integers and bools
U32 = dtype("uint32")

# ---- element-wise ----------------------------------------------------------------------------------------------------

_ABOUT = {"exp": "e ** x", "exp2": "2 ** x", "log": "natural logarithm", "log2": "logarithm to base 2", "log1p": "log(1 + x)",
          "expm1": "exp(x) - 1", "sqrt": "square root", "rsqrt": "1 / sqrt(x)", "sin": "sine", "cos": "cosine",
          "tan": "tangent", "tanh": "hyperbolic tangent", "erf": "error function", "sigmoid": "1 / (1 + exp(-x))"}


def _float_function(name: str) -> Callable[[Any], Tensor]:
    def fn(x: Any) -> Tensor:
        return Tensor(make(name, [floating(node_of(x, f"T.{name}"))]))

    fn.__name__, fn.__doc__ = name, f"{_ABOUT[name]}, of each element, in the type of x (integers: float32)."
    return public()(fn)


exp, exp2, log, log2, log1p, expm1, sqrt, rsqrt, sin, cos, tan, tanh, erf, sigmoid = map(_float_function, _ABOUT)


def _plain(name: str, about: str, *names: str) -> Callable[[Any], Tensor]:
    op = name.removeprefix("logical_")

    def fn(x: Any) -> Tensor:
        n = node_of(x, f"T.{name}")
        return Tensor(n) if n.dtype.is_int and name in ("floor", "ceil", "trunc", "round") else elementwise(op, Tensor(n))

    fn.__name__, fn.__doc__ = name, about
    return public(*names)(fn)


floor = _plain("floor", "The greatest integer that is not above each element.")
ceil = _plain("ceil", "The least integer that is not below each element.")
trunc = _plain("trunc", "Each element without its fraction.")
round_ = _plain("round", "The nearest integer, ties to even.", "nearbyint")
abs_ = _plain("abs", "Absolute value.", "fabs")
sign = _plain("sign", "-1, 0 or 1; NaN stays.")
isnan = _plain("isnan", "Whether each element is NaN, as bool.")
isinf = _plain("isinf", "Whether each element is infinite, as bool.")
isfinite = _plain("isfinite", "Whether each element is neither infinite nor NaN, as bool.")
logical_not = _plain("logical_not", "The negation of bools; the complement of the bits of integers.", "bitwise_not")


def _pair(name: str, op: str, about: str, *names: str) -> Callable[[Any, Any], Tensor]:
    def fn(a: Any, b: Any) -> Tensor:
        return elementwise(op, a, b)

    fn.__name__, fn.__doc__ = name, about
    return public(*names)(fn)


atan2 = _pair("atan2", "atan2", "The angle of (b, a).")
floordiv = _pair("floordiv", "floordiv", "a / b rounded down.")
floormod = _pair("floormod", "mod", "a - b * floor(a / b), with the sign of b.", "remainder")
logical_and = _pair("logical_and", "and", "Both; the bits of integers.", "bitwise_and")
logical_or = _pair("logical_or", "or", "One or both; the bits of integers.", "bitwise_or")
logical_xor = _pair("logical_xor", "xor", "One but not both; the bits of integers.", "bitwise_xor")
shift_left = _pair("shift_left", "shl", "a << b.")
shift_right = _pair("shift_right", "shr", "a >> b.")
maximum = _pair("maximum", "max", "The greater of two elements; if one is NaN, the other.")
minimum = _pair("minimum", "min", "The lesser of two elements; if one is NaN, the other.")
public("pow", "power")(power)


@public(methods=False)
def max_(x: Any, y: Any = None, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The greater of two elements; with one tensor, the greatest along axes.  If one is NaN, the other."""
    return reduce_max(x, axis, keepdims) if y is None else maximum(x, y)


@public(methods=False)
def min_(x: Any, y: Any = None, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The lesser of two elements; with one tensor, the least along axes.  If one is NaN, the other."""
    return reduce_min(x, axis, keepdims) if y is None else minimum(x, y)


@public("clip")
def clamp(x: Any, min_val: Any = None, max_val: Any = None) -> Tensor:
    """min(max(x, min_val), max_val)."""
    out = x if min_val is None else maximum(x, min_val)
    return Tensor(node_of(out, "T.clamp")) if max_val is None else minimum(out, max_val)


@public("if_then_else", methods=False)
def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition is true, else b; shapes broadcast, types are promoted."""
    c = node_of(condition, "T.where")
    return Tensor(make("where", [c, *(x for x in matched("T.where", a, b))], dt=None))


@public("astype", "to")
def cast(x: Any, dtype: Any) -> Tensor:
    """Convert to another type: to integers truncating, saturating, NaN to 0; to narrower floats rounding to nearest even."""
    n, dt = node_of(x, "T.cast"), type_named(dtype, "T.cast")
    return Tensor(converted(n, dt))


# ---- reductions, scans, orders ---------------------------------------------------------------------------------------

def accumulator(dt: dtype, kind: str = "sum") -> dtype:
    """The type of the accumulator of a type: float32 for narrower floats, 32 bits for narrower integers."""
    if kind not in ("sum", "prod"):
        return dt
    if dt.is_float:
        return dt if dt.bits >= 32 else F32
    return dt if dt.bits >= MOST_INTS and not dt.is_bool else U32 if dt.is_unsigned else I32


def reduced(kind: str, x: Any, axis: Any, keepdims: bool) -> Tensor:
    """A reduction of a tensor over axes, all where axis is None."""
    what = f"T.{kind}"
    n = node_of(x, what)
    if kind in ("any", "all") and not n.dtype.is_bool:
        raise wrong_type(what, "bool: compare first, x != 0", n.dtype)
    if kind in ("sum", "prod") and not n.dtype.is_float:
        n = converted(n, accumulator(n.dtype))
    axes = axes_of(n, axis, what)
    if not axes:
        return Tensor(n)
    return Tensor(make("reduce", [n], {"kind": kind, "axes": axes, "keepdims": bool(keepdims),
                                       "accum": accumulator(n.dtype, kind)}))


def _reduction(name: str, kind: str, about: str, *names: str) -> Callable[..., Tensor]:
    def fn(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        return reduced(kind, x, axis, keepdims)

    fn.__name__, fn.__doc__ = name, f"{about}  axis: an integer or several, None for all; keepdims: keep them with extent 1."
    return public(*names)(fn)


sum_ = _reduction("sum", "sum", "The sum; 16-bit floats are added in float32, narrow integers in int32; 0 of no element.",
                  "reduce_sum")
prod = _reduction("prod", "prod", "The elements multiplied; 1 of no element.")
any_ = _reduction("any", "any", "Whether one is true.")
all_ = _reduction("all", "all", "Whether all are true.")
reduce_max = _reduction("reduce_max", "max", "The greatest element that is not NaN; the least value of the type of no element.",
                        "amax")
reduce_min = _reduction("reduce_min", "min", "The least element that is not NaN; the greatest value of the type of no element.",
                        "amin")
METHODS.update({"max": reduce_max, "min": reduce_min})


def count_along(n: Node, axes: Sequence[int]) -> Size:
    """The number of elements along axes."""
    return count_elements(n.shape[a] for a in axes)


def wide(x: Any, what: str) -> Tensor:
    """A tensor in the type in which composed functions compute: float32, or float64 for float64."""
    n = node_of(x, what)
    return Tensor(converted(n, n.dtype if n.dtype == F64 else F32))


def narrowed(x: Tensor, like: Any) -> Tensor:
    """The result of a composed function in the type of its argument; float32 for integers."""
    dt = like.dtype if isinstance(like, Tensor) and like.dtype.is_float else F32
    return Tensor(converted(x.node, dt))


@public()
def mean(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The mean, computed in float32 (float64 for float64), in the type of x; integers: float32.  NaN of no element."""
    w = wide(x, "T.mean")
    count = count_along(w.node, axes_of(w.node, axis, "T.mean"))
    return narrowed(sum_(w, axis, keepdims) / count, x)


@public("variance")
def var(x: Any, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """The mean of squared distances from the mean; ddof: subtracted from the count."""
    w = wide(x, "T.variance")
    count = count_along(w.node, axes_of(w.node, axis, "T.variance"))
    d = w - mean(w, axis, True)
    return narrowed(sum_(d * d, axis, keepdims) / (count - ddof), x)


@public()
def std(x: Any, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """The square root of the variance."""
    return narrowed(sqrt(var(wide(x, "T.std"), axis, keepdims, ddof)), x)


def _extreme(kind: str) -> Callable[..., Tensor]:
    def fn(x: Any, axis: int = -1, keepdims: bool = False) -> Tensor:
        n = node_of(x, f"T.arg{kind}")
        return Tensor(make("argreduce", [n], {"kind": kind, "axis": axis_of(n, axis, f"T.arg{kind}"),
                                              "keepdims": bool(keepdims)}))

    fn.__name__ = f"arg{kind}"
    fn.__doc__ = f"int32: where along an axis the {kind}imum stands, the first of equal ones; NaN is passed over."
    return public()(fn)


argmax, argmin = _extreme("max"), _extreme("min")


def _scan(name: str, kind: str) -> Callable[..., Tensor]:
    def fn(x: Any, axis: int = -1, reverse: bool = False, *, dim: int | None = None) -> Tensor:
        n = node_of(x, f"T.{name}")
        n = converted(n, accumulator(n.dtype, kind)) if not n.dtype.is_float else n
        at = axis_of(n, axis if dim is None else dim, f"T.{name}")
        return Tensor(make("scan", [n], {"kind": kind, "axis": at, "reverse": bool(reverse),
                                         "accum": accumulator(n.dtype, kind)}))

    fn.__name__ = name
    fn.__doc__ = f"The {kind} of the elements up to each one along an axis; reverse: from each one on."
    return public()(fn)


cumsum, cumprod, cummax, cummin = (_scan(f"cum{k}", k) for k in ("sum", "prod", "max", "min"))


@public()
def argsort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """int32: the order of the elements along an axis; equal ones keep theirs, NaN comes last."""
    n = node_of(x, "T.argsort")
    return Tensor(make("argsort", [n], {"axis": axis_of(n, axis, "T.argsort"), "descending": bool(descending)}))


@public()
def sort(x: Any, axis: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """(elements in order along an axis, their int32 indices)."""
    order = argsort(x, axis, descending)
    return take_along(x, order, axis), order


@public()
def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """(the k greatest or least elements along an axis, best first, their int32 indices).  k: a number up to the extent."""
    n = node_of(x, "T.topk")
    at = axis_of(n, axis, "T.topk")
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or isinstance(n.shape[at], int) and k > n.shape[at]:
        raise error("program-data-shape" if isinstance(k, Tensor) else "program-axis",
                    f"T.topk takes {described(k)} of {n.shape[at]} elements", found=described(k),
                    expected=f"a number from 1 to {n.shape[at]}", hint="give k as a Python number")
    order = Tensor(make("argtopk", [n], {"axis": at, "k": k, "largest": bool(largest)}))
    return take_along(x, order, at), order


# ---- shapes ----------------------------------------------------------------------------------------------------------

def _shape(given: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Sizes that are given one by one or as a tuple."""
    shape = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    for s in shape:
        if isinstance(s, bool) or not isinstance(s, (int, Dim)):
            raise error("program-data-shape" if isinstance(s, Tensor) else "program-reshape",
                        f"{what} is given {described(s)} as a size", expected="integers, or sizes of tensors",
                        found=described(s), hint="sizes follow from shapes: x.shape[0]")
    return shape


@public("view")
def reshape(x: Any, *shape: Any) -> Tensor:
    """The elements, in row-major order, in another shape; one size may be -1."""
    n, want = node_of(x, "T.reshape"), list(_shape(shape, "T.reshape"))
    if want.count(-1) == 1:
        known = count_elements(s for s in want if s != -1)
        if known != 0:
            want[want.index(-1)] = count_elements(n.shape) // known if isinstance(known, int) \
                else Dim.__floordiv__(_as_dim(count_elements(n.shape)), known)
    if tuple(want) == n.shape:
        return Tensor(n)
    return Tensor(make("reshape", [n], {"shape": tuple(want)}))


def _as_dim(s: Size) -> Dim:
    return s if isinstance(s, Dim) else Dim((((), s),))


@public("permute")
def transpose(x: Any, *axes: Any) -> Tensor:
    """The tensor with its axes in another order: all of them are named, or none for the reverse order."""
    n = node_of(x, "T.transpose")
    given = tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    perm = tuple(axis_of(n, a, "T.transpose") for a in given) if given else tuple(reversed(range(n.ndim)))
    if sorted(perm) != list(range(n.ndim)):
        raise error("program-axis", f"T.transpose of {n.ndim} axes names {given}", expected=f"each of {n.ndim} axes once",
                    found=repr(given), hint="T.swapaxes(x, a, b) exchanges two axes")
    return Tensor(n) if perm == tuple(range(n.ndim)) else Tensor(make("transpose", [n], {"perm": perm}))


@public()
def swapaxes(x: Any, a: int, b: int) -> Tensor:
    """The tensor with two axes exchanged."""
    n = node_of(x, "T.swapaxes")
    perm, i, j = list(range(n.ndim)), axis_of(n, a, "T.swapaxes"), axis_of(n, b, "T.swapaxes")
    perm[i], perm[j] = perm[j], perm[i]
    return transpose(x, perm)


@public("expand_dims")
def unsqueeze(x: Any, axis: int) -> Tensor:
    """The tensor with a further axis of extent 1, which stands at `axis` of the result."""
    n = node_of(x, "T.unsqueeze")
    at = axis_of(n.ndim + 1, axis, "T.unsqueeze")
    return reshape(x, (*n.shape[:at], 1, *n.shape[at:]))


@public()
def squeeze(x: Any, axis: Any = None) -> Tensor:
    """The tensor without axes of extent 1: those named, or all."""
    n = node_of(x, "T.squeeze")
    gone = [k for k, s in enumerate(n.shape) if s == 1] if axis is None else axes_of(n, axis, "T.squeeze")
    return reshape(x, tuple(s for k, s in enumerate(n.shape) if k not in gone))


@public()
def flatten(x: Any, start: int = 0, end: int = -1) -> Tensor:
    """The axes from start to end as one."""
    n = node_of(x, "T.flatten")
    a, b = axis_of(n, start, "T.flatten"), axis_of(n, end, "T.flatten")
    return reshape(x, (*n.shape[:a], count_elements(n.shape[a:b + 1]), *n.shape[b + 1:]))


@public("expand")
def broadcast_to(x: Any, *shape: Any) -> Tensor:
    """The tensor repeated to a shape, by NumPy's rule."""
    n, want = node_of(x, "T.broadcast_to"), _shape(shape, "T.broadcast_to")
    if broadcast_shapes((n.shape, want), "T.broadcast_to") != tuple(want):
        raise error("program-shape", f"{text_of(n.shape)} does not broadcast to {text_of(want)}",
                    expected=f"a shape that {text_of(n.shape)} broadcasts to", found=text_of(want))
    return Tensor(make("broadcast", [n], {"shape": tuple(want)})) if want != n.shape else Tensor(n)


def _tensors(xs: Any, what: str) -> list[Node]:
    if isinstance(xs, Tensor) or not isinstance(xs, (tuple, list)) or not xs:
        raise error("program-operand", f"{what} joins a list of tensors, found {described(xs)}",
                    expected="a list or tuple of tensors", found=described(xs), hint=f"write {what}([a, b])")
    return matched(what, *xs)


@public("concatenate", "cat", methods=False)
def concat(xs: Any, axis: int = 0) -> Tensor:
    """Tensors joined along an axis; the other extents are equal, types are promoted."""
    nodes = _tensors(xs, "T.concat")
    return Tensor(make("concat", nodes, {"axis": axis_of(nodes[0], axis, "T.concat")}))


@public(methods=False)
def stack(xs: Any, axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis."""
    return concat([unsqueeze(Tensor(n), axis) for n in _tensors(xs, "T.stack")], axis)


@public("chunk")
def split(x: Any, pieces: int, axis: int = -1) -> tuple[Tensor, ...]:
    """The tensor cut into a number of equal pieces along an axis."""
    n = node_of(x, "T.split")
    at = axis_of(n, axis, "T.split")
    size = n.shape[at]
    if not isinstance(pieces, int) or pieces < 1 or size % pieces != 0:
        raise error("program-shape", f"an axis of extent {size} is cut into {pieces} pieces", found=f"{pieces} pieces",
                    expected=f"a divisor of {size}")
    piece = size // pieces
    index = (slice(None),) * at
    return tuple(Tensor(n)[index + (slice(k * piece, (k + 1) * piece),)] for k in range(pieces))


@public()
def pad(x: Any, widths: Any, value: Any = 0) -> Tensor:
    """The tensor with elements of a value before and after: a pair of numbers for each axis, or for the last ones."""
    n = node_of(x, "T.pad")
    pairs = [tuple(w) for w in ((widths,) if isinstance(widths[0], int) else widths)]
    pairs = [(0, 0)] * (n.ndim - len(pairs)) + pairs
    if len(pairs) != n.ndim or any(len(p) != 2 or not all(isinstance(w, int) and w >= 0 for w in p) for p in pairs):
        raise error("program-shape", f"T.pad of {text_of(n.shape)} by {widths!r}", expected="a pair of numbers for each axis",
                    found=repr(widths), hint="write T.pad(x, [(before, after), ...])")
    filler = weak(value, n.dtype) if isinstance(value, (bool, int, float)) else node_of(value, "T.pad")
    return Tensor(make("pad", [n], {"before": tuple(p[0] for p in pairs), "after": tuple(p[1] for p in pairs),
                                    "value": converted(filler, n.dtype).attrs["value"]}))


@public()
def flip(x: Any, axis: Any = None) -> Tensor:
    """The tensor with the order of its elements reversed along axes."""
    axes = axes_of(node_of(x, "T.flip"), axis, "T.flip")
    index = tuple(slice(None, None, -1 if k in axes else None) for k in range(x.ndim))
    return Tensor(node_of(x, "T.flip"))[index]


@public()
def roll(x: Any, shift: int, axis: int = -1) -> Tensor:
    """The elements moved along an axis by a number of places; those that leave the end come in at the start."""
    n = node_of(x, "T.roll")
    at = axis_of(n, axis, "T.roll")
    if not isinstance(n.shape[at], int):
        n.shape[at].__index__()
    by = shift % n.shape[at]  # type: ignore[operator]
    lead = (slice(None),) * at
    whole, cut = Tensor(n), n.shape[at] - by
    if by == 0:
        return whole
    return concat([whole[lead + (slice(cut, None),)], whole[lead + (slice(0, cut),)]], at)


@public()
def windows(x: Any, sizes: Any, axes: Any, strides: Any = 1, dilations: Any = 1) -> Tensor:
    """Overlapping windows along axes, which then count positions; the axes of a window stand at the end."""
    n = node_of(x, "T.windows")
    at = tuple(axis_of(n, a, "T.windows") for a in (axes if isinstance(axes, (tuple, list)) else (axes,)))

    def each(v: Any) -> tuple[int, ...]:
        return tuple(v) if isinstance(v, (tuple, list)) else (v,) * len(at)

    out = make("windows", [n], {"axes": at, "sizes": each(sizes), "strides": each(strides), "dilations": each(dilations)})
    for s in out.shape:
        guard(s, "a window")
    return Tensor(out)


# ---- made from sizes -------------------------------------------------------------------------------------------------

@public("arange", methods=False)
def iota(*shape: Any, axis: int = 0) -> Tensor:
    """int32: the index along an axis, of a tensor of a shape; T.iota(n) is 0, 1, ..., n - 1."""
    want = _shape(shape, "T.iota")
    at = axis_of(len(want), axis, "T.iota")
    operand(0, "T.iota")  # outside a program it is an error
    return Tensor(Node("iota", (), MappingProxyType({"axis": at}), tuple(want), I32, here()))


@public(methods=False)
def full(shape: Any, value: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of one value."""
    operand(0, "T.full")
    want = _shape((shape,), "T.full")
    n = converted(node_of(value, "T.full"), type_named(dtype, "T.full"))
    return Tensor(make("broadcast", [n], {"shape": tuple(want)})) if want else Tensor(n)


@public(methods=False)
def zeros(shape: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype)


@public(methods=False)
def ones(shape: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of ones."""
    return full(shape, 1, dtype)


@public()
def zeros_like(x: Any) -> Tensor:
    """Zeros of the shape and type of a tensor."""
    return full(x.shape, 0, x.dtype)


# ---- gathers ---------------------------------------------------------------------------------------------------------

@public("take")
def gather(x: Any, index: Any, axis: int = 0) -> Tensor:
    """Slices of x at integer indices along an axis: the axes of the index stand in its place.  Indices count from 0."""
    n, i = node_of(x, "T.gather"), node_of(index, "T.gather")
    return Tensor(make("gather", [n, i], {"axis": axis_of(n, axis, "T.gather")}))


@public("take_along_axis")
def take_along(x: Any, index: Any, axis: int = -1) -> Tensor:
    """Elements of x at integer indices along an axis; the index has the shape of x, but for that axis."""
    n, i = node_of(x, "T.take_along"), node_of(index, "T.take_along")
    return Tensor(make("take_along", [n, i], {"axis": axis_of(n, axis, "T.take_along")}))


@public()
def one_hot(x: Any, classes: int, dtype: Any = "float32") -> Tensor:
    """1 where the index along a new last axis is the element, else 0."""
    return cast(unsqueeze(x, -1) == iota(classes), dtype)


# ---- contractions ----------------------------------------------------------------------------------------------------

def _specification(spec: Any, count: int, ranks: Sequence[int]) -> str:
    """A specification with "..." written out.  Raises program-einsum."""
    said = repr(spec)

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
    most = builtins.max((rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks) if "..." in t), default=0)
    filled = []
    for term, rank in zip(terms, ranks):
        many = rank - len(term.replace("...", ""))
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


@public(methods=False)
def einsum(spec: str, *xs: Any, dtype: Any = None) -> Tensor:
    """Sums over named indices: T.einsum("mk,kn->mn", a, b) is a @ b.

    spec: one letter for each axis; letters that the result lacks are summed over; "..." stands for further axes.  Operands
    are promoted to one type.  Sums are formed in float32 for narrower floats, int32 for narrower integers; dtype: of the
    result, else that of the operands (float32 for 8-bit floats, the accumulator's for integers).
    """
    nodes = matched("T.einsum", *xs)
    text = _specification(spec, len(nodes), [n.ndim for n in nodes])
    t = nodes[0].dtype
    if t.is_bool:
        raise wrong_type("T.einsum", "numbers", t)
    accum = accumulator(t)
    own = t if t.is_float and t.bits >= 16 else accum
    want = own if dtype is None else type_named(dtype, "T.einsum")
    accum = promote(accum, want) if want.is_float == accum.is_float else accum
    out = make("einsum", nodes, {"spec": text, "accum": accum}, own if want == own else accum)
    return Tensor(converted(out, want))


@public("dot")
def matmul(a: Any, b: Any, dtype: Any = None) -> Tensor:
    """a @ b as in NumPy: over the last axis of a and the last but one of b, the others are batches that broadcast.

    The sum is formed in float32 for narrower floats.  dtype: of the result, as in T.einsum.
    """
    x, y = matched("@", a, b)
    if not x.shape or not y.shape:
        raise error("program-shape", "@ needs tensors with axes", expected="at least one axis each",
                    found=f"{text_of(x.shape)} and {text_of(y.shape)}")
    inner = x.shape[-1], y.shape[0 if y.ndim == 1 else -2]
    if inner[0] != inner[1]:
        raise error("program-shape", f"{text_of(x.shape)} @ {text_of(y.shape)}: the inner extents differ",
                    expected=f"{inner[0]} rows on the right", found=str(inner[1]))
    m, n = ("m" if x.ndim > 1 else ""), ("n" if y.ndim > 1 else "")
    batch = broadcast_shapes((x.shape[:-2], y.shape[:-2]), "@")
    letters = [c for c in string.ascii_lowercase if c not in "mnk"][:len(batch)]
    terms, nodes = [], []
    for node, own in ((x, m + "k"), (y, "k" + n)):
        lead = node.shape[:-2]
        kept = [c if s == batch[len(batch) - len(lead) + i] else "" for i, (c, s) in
                enumerate(zip(letters[len(batch) - len(lead):], lead))]
        shape = (*(s for s, c in zip(lead, kept) if c), *node.shape[len(lead):])
        terms.append("".join(kept) + own)
        nodes.append(reshape(Tensor(node), shape))
    return einsum(f"{terms[0]},{terms[1]}->{''.join(letters)}{m}{n}", *nodes, dtype=dtype)


