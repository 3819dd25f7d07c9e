"""What the results of a whole-tensor program may be: intervals of float64, from the types and lengths of its operations.

Each operation of the graph is computed on intervals that hold whatever a sequence of kernels may give: results of 16-bit
types with and without a rounding, sums in any order, functions within their bounds (docs/guide/numerics.md).  Where rounding
errors decide (a comparison, an order, a NaN), an element is free: nothing is claimed about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tilelang.ir import dtype, numpy_dtype
from tilelang.program.graph import Graph, Node

Array = Any
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
MOST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4028234e38, "float64": 1.7e308}
REASSOCIATED = 4  # units that an arithmetic operation may be off: quotients as products, factors that leave a sum
FUNCTION = 8  # units of the result of a function, after an error of its argument of REASSOCIATED units
ROUGH = 1e-3
FREE_SUM = 1e37  # sums of greater magnitudes may overflow on the way


@dataclass
class Interval:
    """Values from low to high, both NaN where the value is NaN; free: nothing is known.  low is high for integers and bools."""

    low: Array
    high: Array
    free: Array

    def map(self, fn: Callable[[Array], Array]) -> Interval:
        """A function that moves elements."""
        return Interval(fn(self.low), fn(self.high), fn(self.free))


def exact(x: Array) -> Interval:
    """Values that are known."""
    return Interval(x, x, np.zeros(np.shape(x), bool))


def _to(x: Array, name: str) -> Array:
    """Floats rounded to a type."""
    t = np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)
    return np.asarray(x).astype(np.float32 if name == "bfloat16" else t).astype(t).astype(np.float64)


def _is16(name: str) -> bool:
    return name in ("float16", "bfloat16")


def _ordered(low: Array, high: Array, free: Array) -> Interval:
    return Interval(*np.broadcast_arrays(low, high, free))


def computed(low: Array, high: Array, free: Array, dt: dtype, units: float = REASSOCIATED, slack: Array = 0.0) -> Interval:
    """The results of a float operation: widened by its rounding errors, and by a rounding to a 16-bit type."""
    name = str(dt)
    wide = "float32" if _is16(name) else name
    u, least = ULP[wide] * units, LEAST[wide] * units
    low, high = (np.where(np.isinf(x), x, x + s * (np.abs(x) * u + least + slack)) for x, s in ((low, -1), (high, 1)))
    most = MOST[wide] * (1 - 2 * u)
    high = np.where(high > most, np.inf, high)
    low = np.where(low < -most, -np.inf, low)
    low = np.where((low > most) & ~np.isinf(low), most, low)
    high = np.where((high < -most) & ~np.isinf(high), -most, high)
    if _is16(name):
        low, high = np.fmin(low, _to(low, name)), np.fmax(high, _to(high, name))
    return _ordered(low, high, free)


def rounded(x: Interval, dt: dtype) -> Interval:
    """Values after a rounding to a 16-bit type, which is monotone; short forms of functions cost another half unit."""
    name = str(dt)
    if not _is16(name):
        return x
    off = np.where(x.low == x.high, 0.0, 0.51 * ULP[name])
    return Interval(
        _to(x.low - np.abs(np.where(np.isinf(x.low), 0, x.low)) * off, name),
        _to(x.high + np.abs(np.where(np.isinf(x.high), 0, x.high)) * off, name),
        x.free,
    )


def _corners(fn: Callable[..., Array], *xs: Interval) -> tuple[Array, Array, Array]:
    """The interval of a function that is monotone in each operand; free where some corners are NaN."""
    if len(xs) == 1:
        found = [fn(xs[0].low), fn(xs[0].high)]
    else:
        found = [fn(a, b) for a in (xs[0].low, xs[0].high) for b in (xs[1].low, xs[1].high)]
    nan = np.isnan(np.stack(found))
    free = nan.any(0) & ~nan.all(0)
    for x in xs:
        free = free | x.free
    low, high = found[0], found[0]
    for f in found[1:]:
        low, high = np.fmin(low, f), np.fmax(high, f)
    return low, high, free


def _across(a: Interval, b: Interval) -> Array:
    """Where a has zero inside and b may be infinite."""
    inside = (a.low <= 0) & (a.high >= 0) & (a.low != a.high)
    return inside & (np.isinf(b.low) | np.isinf(b.high))


def _times(a: Interval, b: Interval, dt: dtype) -> Interval:
    low, high, free = _corners(np.multiply, a, b)
    return computed(low, high, free | _across(a, b) | _across(b, a), dt)


def _divided(a: Interval, b: Interval, dt: dtype) -> Interval:
    low, high, free = _corners(np.divide, a, b)
    zero = (b.low <= 0) & (b.high >= 0)
    nothing = zero & (b.low == b.high) & (a.low == 0) & (a.high == 0)
    low, high = np.where(nothing, np.nan, low), np.where(nothing, np.nan, high)
    nan = np.isnan(a.low) & np.isnan(a.high) & ~a.free
    tiny = np.maximum(np.abs(b.low), np.abs(b.high)) < 1e-37  # a reciprocal may overflow
    return computed(low, high, free | (zero | tiny) & ~nothing & ~nan, dt)


def _modulo(a: Interval, b: Interval, dt: dtype) -> Interval:
    value = a.low - b.low * np.floor(a.low / b.low)
    same = (a.low == a.high) & (b.low == b.high) & (b.low != 0)
    quotient = a.low / b.low
    near = np.abs(quotient - np.round(quotient)) < 1e-5 * np.abs(quotient) + 1e-6
    out = computed(value, value, a.free | b.free | ~same | near, dt, slack=np.abs(a.low) * 2.0**-22)
    return out


def _floordiv(a: Interval, b: Interval, dt: dtype) -> Interval:
    q = _divided(a, b, dt)
    low, high = np.floor(q.low), np.floor(q.high)
    return Interval(low, high, q.free | np.isinf(low) | np.isinf(high))


def _power(a: Interval, b: Interval, dt: dtype) -> Interval:
    low, high, free = _corners(np.power, a, b)
    steep = np.maximum(np.abs(b.low), np.abs(b.high)) * 4 + 8
    return computed(low, high, free | (a.low <= 0), dt, units=steep * FUNCTION)


def _angle(a: Interval, b: Interval, dt: dtype) -> Interval:
    low, high, free = _corners(np.arctan2, a, b)
    return computed(low, high, free | (b.low <= 1e-30), dt, FUNCTION)


_FLOAT = {"mul": _times, "div": _divided, "mod": _modulo, "pow": _power, "floordiv": _floordiv, "atan2": _angle}
_INT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _integers(op: str, a: Array, b: Array) -> tuple[Array, Array]:
    """(values, where they are not defined)."""
    if op in _INT:
        return _INT[op](a, b), np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)
    if op in ("floordiv", "mod"):
        bad = (b == 0) | (b == -1)
        safe = np.where(bad, 1, b)
        return (a // safe if op == "floordiv" else a % safe), np.broadcast_to(bad, np.broadcast_shapes(a.shape, b.shape))
    if op in ("shl", "shr"):
        bad = (b < 0) | (b >= 8 * b.dtype.itemsize)
        safe = np.where(bad, 0, b)
        out = np.left_shift(a, safe) if op == "shl" else np.right_shift(a, safe)
        return out, np.broadcast_to(bad, out.shape)
    assert op == "pow", op
    return np.power(a, np.maximum(b, 0)), np.broadcast_to(b < 0, np.broadcast_shapes(a.shape, b.shape))


def _binary(n: Node, a: Interval, b: Interval) -> Interval:
    op = n.op
    if not n.inputs[0].dtype.is_float:
        value, bad = _integers(op, a.low, b.low)
        free = a.free | b.free | bad
        if n.dtype.is_bool and op in ("and", "or"):  # one operand decides
            rules = [x.low == (op == "or") for x in (a, b)]
            known = (rules[0] & ~a.free) | (rules[1] & ~b.free)
            value, free = np.where(known, op == "or", value), free & ~known
        return Interval(value, value, free)
    if op in ("max", "min"):
        return _ordered(*_corners(np.fmax if op == "max" else np.fmin, a, b))
    if op in ("add", "sub"):
        fn = np.add if op == "add" else np.subtract
        other = b if op == "add" else Interval(b.high, b.low, b.free)
        low, high = fn(a.low, other.low), fn(a.high, other.high)
        free = a.free | b.free | (np.isnan(low) != np.isnan(high))
        return computed(low, high, free, n.dtype, slack=_cancelled(a, b))
    return _FLOAT[op](a, b, n.dtype)


def _cancelled(a: Interval, b: Interval) -> Array:
    """Products on both sides of a sum may have been rounded or not."""
    sizes = [np.maximum(np.abs(x.low), np.abs(x.high)) for x in (a, b)]
    return np.where(np.isfinite(sizes[0] + sizes[1]), (sizes[0] + sizes[1]) * 2.0**-23, 0)


def _compared(n: Node, a: Interval, b: Interval) -> Interval:
    op, free = n.op, a.free | b.free
    if op in ("gt", "ge"):
        a, b, op = b, a, "lt" if op == "gt" else "le"
    with np.errstate(invalid="ignore"):
        if op == "lt":
            yes, no = a.high < b.low, a.low >= b.high
        elif op == "le":
            yes, no = a.high <= b.low, a.low > b.high
        else:
            points = (a.low == a.high) & (b.low == b.high)
            same, other = points & (a.low == b.low), (a.high < b.low) | (a.low > b.high)
            yes, no = (same, other) if op == "eq" else (other, same)
    nan = np.zeros(np.shape(yes), bool)
    for x in (a, b):
        if x.low.dtype.kind == "f":
            nan = nan | np.isnan(x.low)
    value = np.where(nan, op == "ne", yes)
    return Interval(value, value, free | ~(yes | no | nan))


def _hull(c: Interval, a: Interval, b: Interval) -> Interval:
    """a where c, b where not, both where c is free."""
    if a.low.dtype.kind == "f":
        mixed = np.isnan(a.low) != np.isnan(b.low)
        low, high = np.fmin(a.low, b.low), np.fmax(a.high, b.high)
    else:
        mixed, low, high = a.low != b.low, a.low, a.low
    return _ordered(
        np.where(c.free, low, np.where(c.low, a.low, b.low)),
        np.where(c.free, high, np.where(c.low, a.high, b.high)),
        np.where(c.free, a.free | b.free | mixed, np.where(c.low, a.free, b.free)),
    )


def _sigmoid(x: Array) -> Array:
    return np.where(x > 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _erf(x: Array) -> Array:
    from math import erf

    return np.vectorize(erf, otypes=[float])(x)


_MONOTONE = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "erf": _erf,
    "sigmoid": _sigmoid,
}
_STEPS = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint, "sign": np.sign}
_WAVES = {"sin": np.sin, "cos": np.cos}
_ABSOLUTE = {"tanh": 4.2e-7, "sin": 2e-7, "cos": 2e-7, "log": 1e-7, "log2": 2e-7, "erf": 2e-7, "log1p": 1e-7, "expm1": 2e-7}


def _unary(n: Node, x: Interval) -> Interval:
    op, dt = n.op, n.inputs[0].dtype
    if not dt.is_float:
        fn = {"neg": np.negative, "abs": np.abs, "sign": np.sign, "not": np.logical_not if dt.is_bool else np.invert}.get(op)
        value = x.low if fn is None and op in _STEPS else np.zeros(x.low.shape, bool) if fn is None else fn(x.low)
        value = np.ones_like(value) if op == "isfinite" else value
        return Interval(value, value, x.free)
    if op == "neg":
        return Interval(-x.high, -x.low, x.free)
    if op == "abs":
        low, high, free = _corners(np.abs, x)
        return _ordered(np.where((x.low <= 0) & (x.high >= 0), 0.0, low), high, free)
    if op in ("isnan", "isinf", "isfinite"):
        value = getattr(np, op)(x.low)
        unsure = np.isinf(x.low) != np.isinf(x.high)
        return Interval(value, value, x.free | (unsure if op != "isnan" else False))
    if op in _STEPS:
        return _ordered(*_corners(_STEPS[op], x))
    arg = computed(x.low, x.high, x.free, dtype("float64" if str(dt) == "float64" else "float32"))
    arg = Interval(np.where(x.low == 0, x.low, arg.low), np.where(x.high == 0, x.high, arg.high), x.free)
    if op in ("sqrt", "log", "rsqrt"):  # the domain ends where the operand does
        arg.low = np.where((x.low >= 0) & (arg.low < 0), 0.0, arg.low)
    absolute = 0.0 if str(dt) == "float64" else _ABSOLUTE.get(op, 0.0)
    if op in _MONOTONE:
        low, high, free = _corners(_MONOTONE[op], arg)
        if op in ("log", "rsqrt", "log2"):  # the sign of a zero, and what is below the least number
            free = free | (x.low < 1e-37) & (x.high >= 0)
        return computed(low, high, free, n.dtype, FUNCTION, absolute)
    middle, half = (arg.low + arg.high) / 2, (arg.high - arg.low) / 2
    if op == "tan":
        low, high, free = _corners(np.tan, arg)
        return computed(low, high, free | ~(np.maximum(np.abs(arg.low), np.abs(arg.high)) < 1.4), n.dtype, FUNCTION)
    value = _WAVES[op](middle)
    endless = np.isinf(arg.low) & (arg.low == arg.high)
    value, half = np.where(endless, np.nan, value), np.where(endless, 0, half)
    far = np.maximum(np.abs(arg.low), np.abs(arg.high)) > 1e4
    return computed(
        np.maximum(value - half, -1), np.minimum(value + half, 1), x.free | far & ~endless, n.dtype, FUNCTION, absolute
    )


def _cast(n: Node, x: Interval) -> Interval:
    old, new = n.inputs[0].dtype, n.dtype
    if new.is_float:
        if not old.is_float:
            return computed(x.low.astype(np.float64), x.high.astype(np.float64), x.free, new, 0.5 if new.bits < 64 else 0)
        if new.bits >= 32:
            return x if new.bits > old.bits or old.bits == 32 else computed(x.low, x.high, x.free, new)
        return rounded(x, new)
    if not old.is_float:
        value = x.low != 0 if new.is_bool else x.low.astype(numpy_dtype(new))
        return Interval(value, value, x.free)
    if new.is_bool:
        unsure = (x.low <= 0) & (x.high >= 0) & (x.low != x.high)
        return Interval(x.low != 0, x.low != 0, x.free | unsure)
    info = np.iinfo(numpy_dtype(new))

    def whole(v: Array) -> Array:
        v = np.where(np.isnan(v), 0, np.clip(np.trunc(v), float(info.min), float(info.max)))
        return np.where(
            v >= float(info.max),
            info.max,
            np.where(v <= float(info.min), info.min, np.where(np.abs(v) < float(info.max), v, 0).astype(np.int64)),
        ).astype(numpy_dtype(new))

    low, high = whole(x.low), whole(x.high)
    return Interval(low, low, x.free | (low != high))


def _identity(kind: str, dt: dtype) -> Any:
    if kind not in ("max", "min"):
        return int(kind in ("prod", "all"))
    if dt.is_float:
        return -np.inf if kind == "max" else np.inf
    info = np.iinfo(numpy_dtype(dt))
    return info.min if kind == "max" else info.max


_REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.fmax, "min": np.fmin, "any": np.logical_or, "all": np.logical_and}


def _reduce(n: Node, x: Interval) -> Interval:
    kind, axes, keep = n.attrs["kind"], n.attrs["axes"], n.attrs["keepdims"]
    if kind.startswith("arg"):
        return _argreduce(n, x)
    many = dict(axis=axes, keepdims=keep)
    free = x.free.any(**many)
    start = _identity(kind, n.dtype)
    if kind in ("any", "all"):
        decides = ((x.low == (kind == "any")) & ~x.free).any(**many)
        value = _REDUCE[kind].reduce(x.low, initial=start, **many)
        return Interval(np.where(decides, kind == "any", value), np.where(decides, kind == "any", value), free & ~decides)
    if not n.dtype.is_float:
        fn = {"max": np.maximum, "min": np.minimum}.get(kind, _REDUCE[kind])
        value = fn.reduce(x.low.astype(numpy_dtype(n.dtype)), initial=start, dtype=numpy_dtype(n.dtype), **many)
        return Interval(np.asarray(value), np.asarray(value), free)
    if kind in ("max", "min"):
        return _ordered(*(_REDUCE[kind].reduce(v, initial=start, **many) for v in (x.low, x.high)), free)
    count = int(np.prod([x.low.shape[a] for a in axes]))
    if kind == "prod":
        rest = [k for k in range(x.low.ndim) if k not in axes]
        flat = x.map(lambda v: np.transpose(v, (*axes, *rest)).reshape(count, *(v.shape[k] for k in rest)))
        out = exact(np.ones(flat.low.shape[1:]))
        for k in range(count):
            out = _times(out, flat.map(lambda v, k=k: v[k]), n.attrs["accum"])
        out = computed(out.low, out.high, out.free, n.dtype, 0)
        return out.map(lambda v: np.expand_dims(v, axes)) if keep else out
    low, high, size = (np.asarray(v.sum(**many)) for v in (x.low, x.high, np.maximum(np.abs(x.low), np.abs(x.high))))
    free = free | (np.isnan(low) != np.isnan(high)) | (size > FREE_SUM) & np.isfinite(size)
    return computed(low, high, free, n.dtype, slack=_summed(count, size, n.attrs["accum"]))


def _summed(count: Any, size: Array, accum: dtype) -> Array:
    """The error of a sum of so many terms in any order, of these magnitudes in sum."""
    return np.where(np.isfinite(size), (count + 8) * ULP[str(accum)] * size, 0)


def _argreduce(n: Node, x: Interval) -> Interval:
    axis, keep, top = n.attrs["axes"][0], n.attrs["keepdims"], n.attrs["kind"] == "argmax"
    low, high = x.low, x.high
    if low.dtype.kind == "f":
        worst = -np.inf if top else np.inf
        low, high = np.where(np.isnan(low), worst, low), np.where(np.isnan(high), worst, high)
    best = (low.max if top else high.min)(axis=axis, keepdims=True)
    near = high >= best if top else low <= best
    point = (low == high).all(axis=axis, keepdims=True)
    first = np.argmax(near, axis=axis, keepdims=True)
    one = near.sum(axis=axis, keepdims=True) == 1
    free = x.free.any(axis=axis, keepdims=True) | ~(one | point)
    if not keep:
        first, free = first.squeeze(axis), free.squeeze(axis)
    value = first.astype(np.int32)
    return Interval(value, value, free)


def _einsum(n: Node, xs: Sequence[Interval]) -> Interval:
    spec, accum = n.attrs["spec"], n.attrs["accum"]

    def over(values: Sequence[Array]) -> Array:
        return np.asarray(np.einsum(spec, *values, optimize=len(values) > 2))

    free = _any_of(over, [x.free for x in xs])
    if not accum.is_float:
        value = over([x.low.astype(np.int64) for x in xs]).astype(numpy_dtype(accum)).astype(numpy_dtype(n.dtype))
        return Interval(value, value, free)
    xs = [rounded(x, i.dtype) for x, i in zip(xs, n.inputs)]
    strange = _any_of(over, [~(np.isfinite(x.low) & np.isfinite(x.high)) for x in xs])
    points = all((x.low == x.high)[np.isfinite(x.low)].all() for x in xs)
    finite = [
        Interval(*(np.where(np.isfinite(x.low) & np.isfinite(x.high), v, 0) for v in (x.low, x.high)), x.free) for x in xs
    ]
    middle = over([(x.low + x.high) / 2 for x in finite])
    most = over([np.maximum(np.abs(x.low), np.abs(x.high)) for x in finite])
    least = over([np.maximum(np.abs(x.low), np.abs(x.high)) - (x.high - x.low) / 2 for x in finite])
    letters = dict(zip("".join(spec.split("->")[0].split(",")), [s for x in xs for s in x.low.shape]))
    count = int(np.prod([s for c, s in letters.items() if c not in spec.split("->")[1]]))
    half = np.maximum(most - np.maximum(least, 0), 0) * 2
    half = np.where(np.isfinite(half), half, np.inf)
    low, high = middle - half, middle + half
    if strange.any():
        value = over([(x.low + x.high) / 2 if not points else x.low for x in xs])
        low, high = np.where(strange, value, low), np.where(strange, value, high)
        parts = n.inputs[0].dtype.bits >= 32  # products of float32 are formed in parts on a GPU: inf times a part that is 0
        free = free | (strange & (np.isfinite(value) if points and not parts else True))
    out = computed(low, high, free | (most > FREE_SUM), n.dtype, slack=_summed(count + len(xs) * 2, most, accum))
    return out


def _any_of(over: Callable[[Sequence[Array]], Array], marks: Sequence[Array]) -> Array:
    """Where a marked element stands among the terms of a sum."""
    found: Any = False
    for k, m in enumerate(marks):
        if m.any():
            found = found | (over([x.astype(np.float64) if j == k else np.ones(x.shape) for j, x in enumerate(marks)]) > 0)
    if found is False:
        return np.zeros(over([np.zeros(m.shape) for m in marks]).shape, bool)
    return found


def _scan(n: Node, x: Interval) -> Interval:
    kind, axis = n.attrs["kind"], n.attrs["axis"]
    x = x.map(lambda v: np.flip(v, axis)) if n.attrs["reverse"] else x
    free = np.logical_or.accumulate(x.free, axis=axis)
    accumulate = _REDUCE[kind].accumulate
    if not n.dtype.is_float:
        value = {"max": np.maximum, "min": np.minimum}.get(kind, _REDUCE[kind]).accumulate(
            x.low.astype(numpy_dtype(n.dtype)), axis=axis, dtype=numpy_dtype(n.dtype)
        )
        out = Interval(value, value, free)
    elif kind in ("max", "min"):
        out = Interval(accumulate(x.low, axis=axis), accumulate(x.high, axis=axis), free)
    elif kind == "prod":
        parts, last = [], None
        for k in range(x.low.shape[axis]):
            one = x.map(lambda v, k=k: np.take(v, k, axis))
            last = one if last is None else _times(last, one, n.attrs["accum"])
            parts.append(last)
        out = Interval(*(np.stack([getattr(p, f) for p in parts], axis) for f in ("low", "high", "free"))) if parts else x
        out = computed(out.low, out.high, out.free, n.dtype, 0)
    else:
        low, high, size = (np.add.accumulate(v, axis=axis) for v in (x.low, x.high, np.maximum(np.abs(x.low), np.abs(x.high))))
        free = free | (np.isnan(low) != np.isnan(high)) | (size > FREE_SUM) & np.isfinite(size)
        out = computed(low, high, free, n.dtype, slack=_summed(x.low.shape[axis], size, n.attrs["accum"]))
    return out.map(lambda v: np.flip(v, axis)) if n.attrs["reverse"] else out


def _order(n: Node, x: Interval) -> Interval:
    axis = n.attrs["axis"]
    descending = n.attrs["largest"]
    x = rounded(x, n.inputs[0].dtype) if n.inputs[0].dtype.is_float else x
    low, high = (x.low, x.high) if not descending else (-x.high, -x.low) if x.low.dtype.kind == "f" else (~x.low, ~x.low)
    index = np.argsort(low, axis=axis, kind="stable")
    a, b = (np.take_along_axis(v, index, axis) for v in (low, high))
    points = ((low == high) | (low != low)).all(axis=axis, keepdims=True)
    if a.dtype.kind == "f" and a.shape[axis]:
        a, b = np.where(np.isnan(a), np.inf, a), np.where(np.isnan(b), np.inf, b)
        before = np.fmax.accumulate(b, axis=axis)
        after = np.flip(np.fmin.accumulate(np.flip(a, axis), axis=axis), axis)
        first, last = [(0, 0)] * a.ndim, [(0, 0)] * a.ndim
        first[axis], last[axis] = (1, 0), (0, 1)
        cut = [slice(None)] * a.ndim
        head, tail = list(cut), list(cut)
        head[axis], tail[axis] = slice(0, -1), slice(1, None)
        ok = (np.pad(before[tuple(head)], first, constant_values=-np.inf) < a) & (
            b < np.pad(after[tuple(tail)], last, constant_values=np.inf)
        )
    else:
        ok = np.ones(a.shape, bool)
    free = x.free.any(axis=axis, keepdims=True) | ~(points | ok)
    index, free = (np.take(np.broadcast_to(v, a.shape), np.arange(n.attrs["k"]), axis=axis) for v in (index, free))
    value = index.astype(np.int32)
    return _ordered(value, value, free)


def _ranked(n: Node, x: Interval) -> Interval:
    """x in the order of its own order: sorting keeps bounds."""
    order = n.inputs[1]
    axis = n.attrs["axis"]
    x = rounded(x, n.inputs[0].dtype) if n.dtype.is_float else x

    def in_order(v: Array) -> Array:
        key = v if not order.attrs["largest"] else -v if v.dtype.kind == "f" else ~v
        out = np.take_along_axis(v, np.argsort(key, axis=axis, kind="stable"), axis)
        return np.take(out, np.arange(order.attrs["k"]), axis=axis)

    low, high = in_order(x.low), in_order(x.high)
    free = np.broadcast_to(x.free.any(axis=axis, keepdims=True), low.shape)
    return Interval(low, high if x.high is not x.low else low, free)


def _gather(n: Node, x: Interval, i: Interval) -> Interval:
    axis = n.attrs["axis"]
    x = rounded(x, n.dtype) if n.dtype.is_float else x
    index = np.clip(i.low, 0, max(x.low.shape[axis] - 1, 0))
    if n.op == "take_along":
        out = x.map(lambda v: np.take_along_axis(v, index.astype(np.int64), axis))
        return Interval(out.low, out.high, out.free | i.free)
    out = x.map(lambda v: np.take(v, index, axis=axis))
    shape = (1,) * axis + i.free.shape + (1,) * (x.low.ndim - axis - 1)
    return Interval(out.low, out.high, out.free | i.free.reshape(shape))


def _loop(n: Node, xs: Sequence[Interval]) -> list[Interval]:
    carried, scanned, body = n.attrs["carried"], n.attrs["scanned"], n.attrs["body"]
    states, many, rest = list(xs[:carried]), xs[carried : carried + scanned], xs[carried + scanned :]
    results: list[list[Interval]] = [[] for _ in body.outputs[carried:]]
    for i in range(int(n.attrs["length"])):
        out = intervals(body, [*states, *(x.map(lambda v, i=i: v[i]) for x in many), *rest])
        states = out[:carried]
        for kept, y in zip(results, out[carried:]):
            kept.append(y)
    stacked = [
        Interval(*(np.stack([getattr(y, f) for y in ys]) for f in ("low", "high", "free")))
        if ys
        else exact(np.zeros((0, *map(int, o.shape)), np.float64 if o.dtype.is_float else numpy_dtype(o.dtype)))
        for ys, o in zip(results, body.outputs[carried:])
    ]
    return [*states, *stacked]


_MOVES: dict[str, Callable[[Node, Array], Array]] = {
    "reshape": lambda n, v: v.reshape(n.shape),
    "transpose": lambda n, v: np.transpose(v, n.attrs["perm"]),
    "broadcast": lambda n, v: np.broadcast_to(v, n.shape),
    "slice": lambda n, v: v[np.ix_(*(a + s * np.arange(e) for a, s, e in zip(n.attrs["starts"], n.attrs["steps"], n.shape)))],
}


def _made(n: Node) -> Interval:
    if n.op == "iota":
        return exact(np.indices(tuple(map(int, n.shape)), np.int32)[n.attrs["axis"]])
    value = n.attrs["value"]
    if not n.dtype.is_float:
        return exact(np.asarray(value, numpy_dtype(n.dtype)))
    low = np.asarray(float(value))
    held = low if str(n.dtype) == "float64" else low.astype(np.float32).astype(np.float64)
    return computed(np.minimum(low, held), np.maximum(low, held), np.zeros((), bool), n.dtype, 0.0)


def _one(n: Node, xs: Sequence[Interval]) -> Any:
    if n.op in ("constant", "iota"):
        return _made(n)
    if n.op in _MOVES:
        return xs[0].map(lambda v: _MOVES[n.op](n, v))
    if n.op == "where":
        return _hull(*xs)
    if n.op in ("eq", "ne", "lt", "le", "gt", "ge"):
        return _compared(n, *xs)
    if n.op == "concat":
        return Interval(*(np.concatenate([getattr(x, f) for x in xs], n.attrs["axis"]) for f in ("low", "high", "free")))
    if n.op == "pad":
        widths = tuple(zip(n.attrs["before"], n.attrs["after"]))
        return Interval(
            *(np.pad(v, widths, constant_values=n.attrs["value"]) for v in (xs[0].low, xs[0].high)), np.pad(xs[0].free, widths)
        )
    if (
        n.op == "take_along"
        and n.inputs[1].op == "order"
        and n.inputs[1].inputs[0] is n.inputs[0]
        and n.inputs[1].attrs["axis"] == n.attrs["axis"]
    ):
        return _ranked(n, xs[0])
    simple = {
        "cast": _cast,
        "reduce": _reduce,
        "scan": _scan,
        "order": _order,
        "gather": _gather,
        "take_along": _gather,
    }
    if n.op in simple:
        return simple[n.op](n, *xs)
    if n.op == "einsum":
        return _einsum(n, xs)
    if n.op == "loop":
        return _loop(n, xs)
    if n.op == "item":
        return xs[0][n.attrs["index"]]  # type: ignore[index]
    return _unary(n, xs[0]) if len(xs) == 1 else _binary(n, *xs)


def intervals(graph: Graph, given: Sequence[Interval]) -> list[Interval]:
    """The results of a program without named sizes; not yet rounded to their types."""
    values: dict[Node, Any] = dict(zip(graph.inputs, given))
    with np.errstate(all="ignore"):
        for n in graph.nodes:
            if n not in values:
                values[n] = _one(n, [values[x] for x in n.inputs])
    return [values[n] for n in graph.outputs]


def bounds(graph: Graph, arrays: Sequence[Array], sizes: Mapping[str, int]) -> list[Interval]:
    """What each result may be, for the arrays of a call."""
    fixed = graph.at(sizes) if sizes else graph
    given = [
        exact(np.asarray(a).astype(np.float64) if n.dtype.is_float else np.asarray(a)) for a, n in zip(arrays, fixed.inputs)
    ]
    with np.errstate(all="ignore"):
        return [rounded(x, n.dtype) if n.dtype.is_float else x for x, n in zip(intervals(fixed, given), fixed.outputs)]


def outside(got: Array, x: Interval, margin: float = 0.0) -> str:
    """Empty, or where a result is none of those that are possible.  margin: relative; from ROUGH on to the greatest one."""
    got = np.asarray(got)
    if got.shape != x.low.shape:
        return f"the shape {got.shape}, expected {x.low.shape}"
    if x.low.dtype.kind != "f":
        bad = (got != x.low) & ~x.free
    else:
        g = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            sizes = [np.where(np.isfinite(v), np.abs(v), 0) for v in (x.low, x.high)]
            off = margin * (sizes[0] + sizes[1] if margin < ROUGH else max(v.max(initial=0) for v in sizes))
            bad = ~(x.free | (np.isnan(g) & np.isnan(x.low)) | ((g >= x.low - off) & (g <= x.high + off)))
    if not bad.any():
        return ""
    at = tuple(int(k) for k in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {bad.size} are wrong, first at {at}: {got[at]}, may be {x.low[at]} to {x.high[at]}"
