"""What each primitive operation computes, in NumPy: the reference of compiled programs.

Values of 16- and 8-bit float types are float32 arrays here; `rounded` says where they are rounded to their type.
An operation is a function of its node, the values of its operands, and its attributes by name (graph.py lists them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import dtype, int_range, numpy_dtype
from tilelang.ir.numbers import binary_function, to_dtype
from tilelang.jit.simulated import as_numpy, like_first
from tilelang.simulator.reference.run import run_tile
from tilelang.target.intrinsics import intrinsic

from .graph import BINARY, COMPARE, UNARY, Graph, Node, arrays_among

register("program-index-range", IndexError, "an index tensor names an element that the tensor does not have",
         "indices count from 0; they are not taken from the end")

Array: TypeAlias = "np.ndarray[Any, Any]"
ROUNDED = ("input", "einsum", "gather", "take_along", "order", "tile", "loop")  # their operands are rounded


def held_in(dt: dtype) -> np.dtype[Any]:
    """The NumPy type in which values of a type are computed."""
    return np.dtype(np.float32) if dt.is_float and dt.bits < 32 else numpy_dtype(dt)


def rounded(x: Array, dt: dtype) -> Array:
    """Values of a 16- or 8-bit float type, rounded to it; others as they are."""
    if not dt.is_float or dt.bits >= 32 and dt.base != "tfloat32":
        return x
    return np.asarray(to_dtype(x, dt)).astype(np.float32)


# ---- element-wise ----------------------------------------------------------------------------------------------------

_NAMES = {"and": "bitand", "or": "bitor", "xor": "bitxor", "mod": "floormod"}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "log1p": np.log1p, "expm1": np.expm1, "round": np.rint,
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "not": np.invert}


def _unary(op: str) -> Callable[..., Any]:
    fn = _UNARY.get(op) or intrinsic(op).reference
    assert fn is not None, f"the intrinsic {op} has no meaning"
    return lambda n, x: fn(x)


def _binary(op: str) -> Callable[..., Any]:
    def run(n: Node, a: Array, b: Array) -> Any:
        if a.dtype.kind == "f" and op == "mod":
            return np.mod(a, b)
        return binary_function(_NAMES.get(op, op), dtype(a.dtype.name))(a, b)

    return run


def _pow(n: Node, a: Array, b: Array) -> Any:
    return np.power(a, b if n.dtype.is_float else np.maximum(b, 0))


def _cast(n: Node, x: Array) -> Array:
    return rounded(np.asarray(to_dtype(x, n.dtype)), n.dtype)


# ---- reductions, scans, orders ---------------------------------------------------------------------------------------

_REDUCE: dict[str, Any] = {"sum": np.add, "prod": np.multiply, "max": np.fmax, "min": np.fmin, "any": np.logical_or,
                           "all": np.logical_and}


def _identity(kind: str, dt: dtype) -> Any:
    """The result of a reduction of no element."""
    if kind not in ("max", "min"):
        return int(kind in ("prod", "all"))
    least, greatest = (-np.inf, np.inf) if dt.is_float else int_range(dt)
    return least if kind == "max" else greatest


def _reduce(n: Node, x: Array, kind: str, axes: tuple[int, ...], keepdims: bool, accum: dtype) -> Any:
    if kind.startswith("arg"):
        if x.dtype.kind == "f":
            x = np.where(np.isnan(x), _identity(kind[3:], n.inputs[0].dtype), x)
        return (np.argmax if kind == "argmax" else np.argmin)(x, axis=axes[0], keepdims=keepdims)
    return _REDUCE[kind].reduce(x.astype(held_in(accum)), axis=axes, keepdims=keepdims, initial=_identity(kind, n.dtype))


def _scan(n: Node, x: Array, kind: str, axis: int, reverse: bool, accum: dtype) -> Any:
    def ordered(y: Array) -> Array:
        return np.flip(y, axis) if reverse else y

    return ordered(_REDUCE[kind].accumulate(ordered(x.astype(held_in(accum))), axis=axis))


def _order(n: Node, x: Array, axis: int, k: int, largest: bool) -> Any:
    key = x if not largest else -x if x.dtype.kind == "f" else ~x
    return np.take(np.argsort(key, axis=axis, kind="stable"), np.arange(k), axis=axis)


def _einsum(n: Node, *xs: Array, spec: str, accum: dtype) -> Any:
    return np.einsum(spec, *(x.astype(held_in(accum), copy=False) for x in xs), optimize=True)


# ---- places of elements ----------------------------------------------------------------------------------------------

def _slice(n: Node, x: Array, starts: Sequence[int], steps: Sequence[int]) -> Array:
    for axis, (start, step, extent) in enumerate(zip(starts, steps, n.shape)):
        if (start, step, extent) != (0, 1, x.shape[axis]):
            x = np.take(x, start + step * np.arange(int(extent)), axis=axis)
    return x


def _in_range(n: Node, index: Array, extent: int) -> Array:
    if index.size and (index.min() < 0 or index.max() >= extent):
        bad = index.min() if index.min() < 0 else index.max()
        raise error("program-index-range", f"the index ‹{bad}› is outside an axis of extent {extent}", span=n.span,
                    expected=f"indices from 0 to {extent - 1}")
    return index


# ---- blocks: lists of results ----------------------------------------------------------------------------------------

def _tile(n: Node, *xs: Array, kernel: Any, results: Sequence[Any]) -> list[Array]:
    names = [b.name for _, b in kernel.func.buffers]
    given = {name: np.array(to_dtype(v, x.dtype)) for name, v, x in zip(names, xs, n.inputs)}
    written = dict(zip(names[len(xs):], results))
    out = run_tile(kernel.func, given | {name: np.zeros(shape, numpy_dtype(dt)) for name, (shape, dt) in written.items()})
    return [np.asarray(out[name]).astype(held_in(dt)) for name, (_, dt) in written.items()]


def _loop(n: Node, *xs: Array, body: Graph, carried: int, scanned: int, length: int) -> list[Array]:
    states, many, rest = list(xs[:carried]), xs[carried:carried + scanned], xs[carried + scanned:]
    results: list[list[Array]] = [[] for _ in body.outputs[carried:]]
    for i in range(length):
        out = evaluate(body, [*states, *(x[i] for x in many), *rest])
        states = out[:carried]
        for kept, y in zip(results, out[carried:]):
            kept.append(y)
    return [*states, *(np.stack(r) if r else np.zeros((0, *o.shape), held_in(o.dtype))  # type: ignore[arg-type]
                       for r, o in zip(results, body.outputs[carried:]))]


VALUES: dict[str, Callable[..., Any]] = {
    **{op: _unary(op) for op in UNARY}, **{op: _binary(op) for op in (*BINARY, *COMPARE) if op not in ("pow", "atan2")},
    "pow": _pow, "atan2": lambda n, a, b: np.arctan2(a, b), "where": lambda n, c, a, b: np.where(c, a, b), "cast": _cast,
    "constant": lambda n, value: np.asarray(value, held_in(n.dtype)), "broadcast": lambda n, x: np.broadcast_to(x, n.shape),
    "iota": lambda n, axis: np.indices(n.shape, np.int32)[axis], "reduce": _reduce,
    "einsum": _einsum, "reshape": lambda n, x: x.reshape(n.shape), "transpose": lambda n, x, perm: np.transpose(x, perm),
    "slice": _slice, "concat": lambda n, *xs, axis: np.concatenate(xs, axis),
    "pad": lambda n, x, before, after, value: np.pad(x, tuple(zip(before, after)), constant_values=value),
    "gather": lambda n, x, i, axis: np.take(x, _in_range(n, i, x.shape[axis]), axis),
    "take_along": lambda n, x, i, axis: np.take_along_axis(x, _in_range(n, i, x.shape[axis]).astype(np.int64), axis),
    "scan": _scan, "order": _order, "loop": _loop, "tile": _tile,
    "item": lambda n, results, index: results[index],
}


def evaluate(graph: Graph, arrays: Sequence[Array]) -> list[Array]:
    """The results of a program without named sizes, for arrays in the types of `held_in`."""
    values: dict[Node, Any] = dict(zip(graph.inputs, arrays))
    with np.errstate(all="ignore"):
        for n in graph.nodes:
            if n in values:
                continue
            given = [values[x] for x in n.inputs]
            if n.op in ROUNDED:
                given = [rounded(v, x.dtype) for v, x in zip(given, n.inputs)]
            out = VALUES[n.op](n, *given, **n.attrs)
            values[n] = out if isinstance(out, list) else np.asarray(out).astype(held_in(n.dtype), copy=False)
    return [rounded(values[n], n.dtype) for n in graph.outputs]


def referenced(graph: Graph, arrays: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """The results for arrays of any package, in the package of the first one.  sizes: the named sizes of the arrays' shapes."""
    fixed = graph.at(sizes) if sizes else graph
    given = []
    for x, n in zip(arrays, fixed.inputs):
        if not isinstance(x, (bool, int, float, np.generic)):
            x = as_numpy(x.cpu() if hasattr(x, "cpu") else x, n.dtype)
        given.append(rounded(np.asarray(x), n.dtype).astype(held_in(n.dtype), copy=False))
    out = [np.array(to_dtype(v, n.dtype)) for v, n in zip(evaluate(fixed, given), fixed.outputs)]  # no views of arguments
    like = next(iter(arrays_among(arrays)), None)
    if like is None or isinstance(like, np.ndarray):
        return out
    return [like_first(like, y, n.dtype) for y, n in zip(out, fixed.outputs)]
