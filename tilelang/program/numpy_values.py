"""What each primitive operation computes, in NumPy: the reference of compiled programs.

Values of 16- and 8-bit float types are float32 arrays here; `rounded` says where they are rounded to their type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import dtype, numpy_dtype
from tilelang.ir.numbers import binary_function, to_dtype
from tilelang.jit.simulated import as_numpy, like_first
from tilelang.simulator.reference.run import run_tile
from tilelang.target.intrinsics import intrinsic

from .graph import BINARY, COMPARE, FORMATS, UNARY, Graph, Node

register("program-index-range", IndexError, "an index tensor names an element that the tensor does not have",
         "indices count from 0; they are not taken from the end")

Array: TypeAlias = "np.ndarray[Any, Any]"
Value: TypeAlias = Callable[[Node, Sequence[Array]], Array]
ROUNDED = ("input", "einsum", "gather", "take_along", "argsort", "argtopk", "tile", "loop")  # their operands are rounded


def held_in(dt: dtype) -> np.dtype[Any]:
    """The NumPy type in which values of a type are computed."""
    return np.dtype(np.float32) if dt.is_float and dt.bits < 32 else numpy_dtype(dt)


def rounded(x: Array, dt: dtype) -> Array:
    """Values of a 16- or 8-bit float type, rounded to it; others as they are."""
    if not dt.is_float or dt.bits >= 32 and dt.base != "tfloat32":
        return x
    return np.asarray(to_dtype(x, dt)).astype(np.float32)


_NAMES = {"and": "bitand", "or": "bitor", "xor": "bitxor", "mod": "floormod"}


def _binary(op: str) -> Value:
    def run(n: Node, values: Sequence[Array]) -> Array:
        a, b = values
        dt = dtype(a.dtype.name)
        if op == "pow":
            return np.power(a, b) if dt.is_float else _int_power(a, b)
        if op == "atan2":
            return np.arctan2(a, b)
        if dt.is_bool and op in _NAMES:
            return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[op](a, b)
        if dt.is_float and op == "mod":
            return a - b * np.floor(a / b)
        return np.asarray(binary_function(_NAMES.get(op, op), dt)(a, b))

    return run


def _int_power(a: Array, b: Array) -> Array:
    return np.power(a, np.maximum(b, 0))


_FLOAT = {"neg": np.negative, "abs": np.abs, "sign": np.sign, "log1p": np.log1p, "expm1": np.expm1, "round": np.rint,
          "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite}


def _unary(op: str) -> Value:
    fn = _FLOAT.get(op) or (np.logical_not if op == "not" else intrinsic(op).reference)
    assert fn is not None, f"the intrinsic {op} has no meaning"

    def run(n: Node, values: Sequence[Array]) -> Array:
        x = values[0]
        if op == "not" and x.dtype != np.bool_:
            return np.invert(x)
        return np.asarray(fn(x)).astype(held_in(n.dtype), copy=False)

    return run


def _cast(n: Node, values: Sequence[Array]) -> Array:
    x = values[0]
    return rounded(np.asarray(to_dtype(x, n.dtype)), n.dtype).astype(held_in(n.dtype), copy=False)


_REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.fmax, "min": np.fmin, "any": np.logical_or, "all": np.logical_and}


def identity(kind: str, dt: dtype) -> Any:
    """The result of a reduction or scan of no element."""
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if dt.is_float:
        return -np.inf if kind == "max" else np.inf
    info = np.iinfo(numpy_dtype(dt))
    return info.min if kind == "max" else info.max


def _reduce(n: Node, values: Sequence[Array]) -> Array:
    kind = n.attrs["kind"]
    x = values[0].astype(held_in(n.attrs["accum"]), copy=False)
    out = _REDUCE[kind].reduce(x, axis=n.attrs["axes"], keepdims=n.attrs["keepdims"], initial=identity(kind, n.dtype))
    return np.asarray(out).astype(held_in(n.dtype), copy=False)


def _argreduce(n: Node, values: Sequence[Array]) -> Array:
    x, axis = values[0], n.attrs["axis"]
    worst = identity(n.attrs["kind"], n.inputs[0].dtype)
    if x.dtype.kind == "f":
        x = np.where(np.isnan(x), worst, x)
    find = np.argmax if n.attrs["kind"] == "max" else np.argmin
    return np.asarray(find(x, axis=axis, keepdims=n.attrs["keepdims"])).astype(np.int32)


def _einsum(n: Node, values: Sequence[Array]) -> Array:
    accum = held_in(n.attrs["accum"])
    out = np.einsum(n.attrs["spec"], *(v.astype(accum, copy=False) for v in values), optimize=True)
    return np.asarray(out).astype(held_in(n.dtype), copy=False)


def _numbers(n: Node) -> tuple[int, ...]:
    """The shape, of a program without named sizes."""
    return tuple(map(int, n.shape))


def _slice(n: Node, values: Sequence[Array]) -> Array:
    x = values[0]
    for axis, (start, step, extent) in enumerate(zip(n.attrs["starts"], n.attrs["steps"], _numbers(n))):
        if (start, step, extent) != (0, 1, x.shape[axis]):
            x = np.take(x, start + step * np.arange(extent), axis=axis)
    return x


def _windows(n: Node, values: Sequence[Array]) -> Array:
    x, axes = values[0], n.attrs["axes"]
    index: list[Any] = [np.arange(s) for s in x.shape]
    rank = len(n.shape)
    shape = _numbers(n)
    for k in range(x.ndim):
        i = np.arange(shape[k]).reshape([-1 if a == k else 1 for a in range(rank)])
        if k in axes:
            at = axes.index(k)
            w = np.arange(n.attrs["sizes"][at]).reshape([-1 if a == x.ndim + at else 1 for a in range(rank)])
            i = i * n.attrs["strides"][at] + w * n.attrs["dilations"][at]
        index[k] = i
    return x[tuple(index)]


def _in_range(n: Node, index: Array, extent: int) -> Array:
    if index.size and (index.min() < 0 or index.max() >= extent):
        bad = index.min() if index.min() < 0 else index.max()
        raise error("program-index-range", f"the index {bad} is outside an axis of extent {extent}", span=n.span,
                    expected=f"indices from 0 to {extent - 1}", found=str(bad))
    return index


def _gather(n: Node, values: Sequence[Array]) -> Array:
    axis = n.attrs["axis"]
    return np.take(values[0], _in_range(n, values[1], values[0].shape[axis]), axis=axis)


def _take_along(n: Node, values: Sequence[Array]) -> Array:
    axis = n.attrs["axis"]
    return np.take_along_axis(values[0], _in_range(n, values[1], values[0].shape[axis]).astype(np.int64), axis=axis)


def _scan(n: Node, values: Sequence[Array]) -> Array:
    axis = n.attrs["axis"]
    x = values[0].astype(held_in(n.attrs["accum"]), copy=False)
    x = np.flip(x, axis) if n.attrs["reverse"] else x
    out = _REDUCE[n.attrs["kind"]].accumulate(x, axis=axis)
    out = np.flip(out, axis) if n.attrs["reverse"] else out
    return np.asarray(out).astype(held_in(n.dtype), copy=False)


def _order(x: Array, axis: int, descending: bool) -> Array:
    """Indices in a stable order, NaN last."""
    key = x if not descending else -x if x.dtype.kind == "f" else ~x
    return np.argsort(key, axis=axis, kind="stable").astype(np.int32)


def _argtopk(n: Node, values: Sequence[Array]) -> Array:
    order = _order(values[0], n.attrs["axis"], n.attrs["largest"])
    return np.take(order, np.arange(n.attrs["k"]), axis=n.attrs["axis"])


def _dequantise(n: Node, values: Sequence[Array]) -> Array:
    q, s, *z = values
    per_byte, bits, signed = FORMATS[n.attrs["format"]]
    raw = q.view(np.uint8)[..., None] >> (bits * np.arange(per_byte, dtype=np.uint8))
    number = (raw & ((1 << bits) - 1)).astype(np.int32).reshape(n.shape)
    if signed:
        number = (number ^ (1 << (bits - 1))) - (1 << (bits - 1))

    def spread(x: Array) -> Array:
        for axis, g in enumerate(n.attrs["groups"]):
            x = np.repeat(x, g, axis=axis)
        return x

    value = number.astype(s.dtype)
    return (value - spread(z[0]).astype(s.dtype) if z else value) * spread(s)


def _tile(n: Node, values: Sequence[Array]) -> Any:
    func = n.attrs["kernel"].func
    names = [b.name for _, b in func.buffers]
    given = {name: np.array(to_dtype(v, x.dtype)) for name, v, x in zip(names, values, n.inputs)}
    results = dict(zip(names[len(values):], n.attrs["results"]))
    out = run_tile(func, given | {name: np.zeros(shape, numpy_dtype(dt)) for name, (shape, dt) in results.items()})
    return [np.asarray(out[name]).astype(held_in(dt)) for name, (_, dt) in results.items()]


def _loop(n: Node, values: Sequence[Array]) -> Any:
    carried, scanned, body = n.attrs["carried"], n.attrs["scanned"], n.attrs["body"]
    states, xs, rest = values[:carried], values[carried:carried + scanned], values[carried + scanned:]
    results: list[list[Array]] = [[] for _ in body.outputs[carried:]]
    for i in range(n.attrs["length"]):
        out = evaluate(body, [*states, *(x[i] for x in xs), *rest])
        states = out[:carried]
        for kept, y in zip(results, out[carried:]):
            kept.append(y)
    stacked = [np.stack(r) if r else np.zeros((0, *map(int, o.shape)), held_in(o.dtype))  # type: ignore[arg-type]
               for r, o in zip(results, body.outputs[carried:])]
    return [*states, *stacked]


VALUES: dict[str, Value] = {
    **{op: _unary(op) for op in UNARY}, **{op: _binary(op) for op in (*BINARY, *COMPARE)},
    "where": lambda n, v: np.where(*v), "cast": _cast, "broadcast": lambda n, v: np.broadcast_to(v[0], _numbers(n)),
    "constant": lambda n, v: np.asarray(n.attrs["value"], held_in(n.dtype)),
    "iota": lambda n, v: np.indices(_numbers(n), np.int32)[n.attrs["axis"]],
    "reduce": _reduce, "argreduce": _argreduce, "einsum": _einsum, "reshape": lambda n, v: v[0].reshape(n.shape),
    "transpose": lambda n, v: np.transpose(v[0], n.attrs["perm"]), "slice": _slice,
    "concat": lambda n, v: np.concatenate(v, axis=n.attrs["axis"]),
    "pad": lambda n, v: np.pad(v[0], tuple(zip(n.attrs["before"], n.attrs["after"])), constant_values=n.attrs["value"]),
    "windows": _windows, "gather": _gather, "take_along": _take_along, "scan": _scan,
    "argsort": lambda n, v: _order(v[0], n.attrs["axis"], n.attrs["descending"]), "argtopk": _argtopk,
    "dequantise": _dequantise, "loop": _loop, "tile": _tile, "item": lambda n, v: v[0][n.attrs["index"]],
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
            values[n] = VALUES[n.op](n, given)
    return [rounded(values[n], n.dtype) for n in graph.outputs]


def reference(graph: Graph, arrays: Sequence[Array], sizes: Mapping[str, int]) -> list[Array]:
    """The results of a program in the NumPy types of its outputs.  sizes: its named sizes, which the arrays' shapes have."""
    fixed = graph.at(sizes) if sizes else graph
    given = [rounded(np.asarray(a), n.dtype).astype(held_in(n.dtype), copy=False) for a, n in zip(arrays, fixed.inputs)]
    return [np.array(to_dtype(v, n.dtype)) for v, n in zip(evaluate(fixed, given), fixed.outputs)]  # no views of arguments


def referenced(graph: Graph, arrays: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """The results for arrays of any package, in the package of the first one."""
    scalars = (bool, int, float, np.generic)
    given = [np.asarray(x) if isinstance(x, scalars) else as_numpy(x.cpu() if hasattr(x, "cpu") else x, n.dtype)
             for x, n in zip(arrays, graph.inputs)]
    like = next((x for x in arrays if hasattr(x, "shape")), None)
    out = reference(graph, given, sizes)
    if like is None or isinstance(like, np.ndarray):
        return out
    return [like_first(like, y, n.dtype) for y, n in zip(out, graph.outputs)]
