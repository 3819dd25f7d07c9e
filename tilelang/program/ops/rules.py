"""Type rules of the primitive operations: (operands, attributes) -> (shape, dtype), or an error at the user's line.

    RULES["reduce"]((x,), {"kind": "sum", "axes": (1,), "keepdims": False, "accum": F32}) -> ((M,), float32)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tilelang.errors import TileLangError, error, register
from tilelang.ir import dtype

from ..graph import BINARY, COMPARE, FORMATS, UNARY, Dim, Node, Size, count_elements

register("program-shape", ValueError, "the shapes of tensors of a program do not fit each other",
         "sizes that are equal have one number or one T.dynamic symbol; reshape, or add axes of extent 1")
register("program-type", TypeError, "an operation of a program is given an element type that it does not have",
         "convert an operand: T.cast(x, dtype) or x.astype(dtype)")
register("program-axis", ValueError, "a tensor of a program does not have the axis",
         "axes count from 0, or from the end from -1")
register("program-einsum", ValueError, "T.einsum is given a specification that does not fit its tensors",
         'write one letter for each axis: T.einsum("bhqd,bhkd->bhqk", q, k)')
register("program-reshape", ValueError, "a reshape changes the number of elements",
         "the number of elements stays; -1 stands for one size that follows from the others")
register("program-gather", TypeError, "a gather is given indices that are no integers, or of another rank",
         "indices are tensors of int32 or int64; compare with T.where for masks")
register("program-quantised", ValueError, "T.quantised is given tensors or a format that do not fit",
         f"formats: {', '.join(FORMATS)}; scales have the shape of the weights, divided by the size of a group along each axis")
register("program-windows", ValueError, "windows do not fit the tensor", "pad the tensor, or take smaller windows")

BOOL, I32, F32, F64 = dtype("bool"), dtype("int32"), dtype("float32"), dtype("float64")
Shape: TypeAlias = "tuple[Size, ...]"
Attrs: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[Sequence[Node], Attrs], tuple[Shape, dtype]]


def text_of(shape: Sequence[Size]) -> str:
    """A shape as a user writes it."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def broadcast_shapes(shapes: Sequence[Shape], what: str) -> Shape:
    """The common shape by NumPy's rule.  Raises program-shape."""
    rank = max(map(len, shapes), default=0)
    out: list[Size] = []
    for k in range(-rank, 0):
        found = dict.fromkeys(s[k] for s in shapes if len(s) >= -k and s[k] != 1)
        if len(found) > 1:
            unsure = any(isinstance(s, Dim) for s in found)
            raise error("program-shape", f"{what}: the shapes {' and '.join(map(text_of, shapes))} do not broadcast",
                        expected="extents that are equal or 1, from the last axis on",
                        found=f"{' and '.join(map(str, found))} at axis {k}" + (" (not known to be equal)" if unsure else ""))
        out.append(next(iter(found), 1))
    return tuple(out)


def axis_of(x: Node | int, axis: Any, what: str) -> int:
    """An axis of a tensor, or of a rank, counted from 0.  Raises program-axis."""
    rank = x if isinstance(x, int) else x.ndim
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        shape = f"rank {rank}" if isinstance(x, int) else f"the shape {text_of(x.shape)}"
        raise error("program-axis", f"{what}: a tensor of {shape} has no axis {axis!r}",
                    expected=f"an integer from {-rank} to {rank - 1}" if rank else "a tensor that has axes", found=repr(axis))
    return axis % rank


def wrong_type(what: str, expected: str, *found: dtype) -> TileLangError:
    """The error of operands of a type that an operation does not have."""
    types = " and ".join(map(str, found))
    return error("program-type", f"{what} is not defined for {types}", expected=expected, found=types)


def _unary(op: str) -> Rule:
    def rule(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
        x = inputs[0]
        if op == "not":
            if x.dtype.is_float:
                raise wrong_type("~", "bool or integers", x.dtype)
        elif x.dtype.is_bool or op not in ("neg", "abs", "sign", "floor", "ceil", "trunc", "round", "isnan", "isinf",
                                           "isfinite") and not x.dtype.is_float:
            raise wrong_type(op, "a float type" if not x.dtype.is_bool else "numbers", x.dtype)
        return x.shape, BOOL if op.startswith("is") else x.dtype

    return rule


_BITS = ("and", "or", "xor")


def _binary(op: str) -> Rule:
    def rule(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
        a, b = inputs
        shape = broadcast_shapes((a.shape, b.shape), op)
        t = a.dtype
        if t != b.dtype:
            raise wrong_type(op, "operands of one type", t, b.dtype)
        if op in _BITS and t.is_float or op in ("shl", "shr") and not t.is_int:
            raise wrong_type(op, "bool or integers" if op in _BITS else "integers", t)
        if t.is_bool and op not in (*_BITS, *COMPARE, "max", "min"):
            raise wrong_type(op, "numbers", t)
        if op in ("div", "atan2") and not t.is_float:
            raise wrong_type(op, "a float type", t)
        return shape, BOOL if op in COMPARE else t

    return rule


def _where(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    c, a, b = inputs
    if not c.dtype.is_bool:
        raise error("program-type", f"T.where chooses by a tensor of bool, found {c.dtype}", expected="a comparison, or bool",
                    hint="compare: T.where(x != 0, a, b)")
    return broadcast_shapes((c.shape, a.shape, b.shape), "T.where"), a.dtype


def _reduced(x: Node, axes: Sequence[int], keepdims: bool) -> Shape:
    return tuple(1 if k in axes else s for k, s in enumerate(x.shape) if keepdims or k not in axes)


def _reduce(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    x, kind = inputs[0], attrs["kind"]
    if x.dtype.is_bool != (kind in ("any", "all")):
        raise wrong_type(f"a reduction by {kind}", "bool" if kind in ("any", "all") else "numbers", x.dtype)
    return _reduced(x, attrs["axes"], attrs["keepdims"]), x.dtype


def _argreduce(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    return _reduced(inputs[0], (attrs["axis"],), attrs["keepdims"]), I32


def _same(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    return inputs[0].shape, inputs[0].dtype


def _argsort(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    return inputs[0].shape, I32


def _argtopk(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    shape = list(inputs[0].shape)
    shape[attrs["axis"]] = attrs["k"]
    return tuple(shape), I32


def sizes_of_letters(spec: str, operands: Sequence[Node]) -> dict[str, Size]:
    """Letter of an einsum -> its extent.  Raises program-einsum."""
    sizes: dict[str, Size] = {}
    for letters, x in zip(spec.split("->")[0].split(","), operands):
        for letter, size in zip(letters, x.shape):
            if sizes.setdefault(letter, size) != size:
                raise error("program-einsum", f'"{spec}": the axis {letter} has the extents {sizes[letter]} and {size}',
                            expected="one extent for each letter", found=f"{sizes[letter]} and {size}",
                            hint="the shapes are " + ", ".join(text_of(o.shape) for o in operands))
    return sizes


def _einsum(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    sizes = sizes_of_letters(attrs["spec"], inputs)
    return tuple(sizes[letter] for letter in attrs["spec"].split("->")[1]), inputs[0].dtype


def _reshape(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    x, shape = inputs[0], attrs["shape"]
    if count_elements(shape) != count_elements(x.shape):
        raise error("program-reshape", f"{text_of(x.shape)} cannot be reshaped to {text_of(shape)}",
                    expected=f"{count_elements(x.shape)} elements", found=f"{count_elements(shape)} elements")
    return shape, x.dtype


def _transpose(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    return tuple(inputs[0].shape[k] for k in attrs["perm"]), inputs[0].dtype


def _given(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    """Ops whose shape the tracer computes."""
    return attrs["shape"], inputs[0].dtype


def _concat(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    first, axis = inputs[0], attrs["axis"]
    for x in inputs[1:]:
        if x.ndim != first.ndim or any(s != t for k, (s, t) in enumerate(zip(x.shape, first.shape)) if k != axis):
            raise error("program-shape", f"{text_of(first.shape)} and {text_of(x.shape)} cannot be joined along axis {axis}",
                        expected="equal extents along the other axes", found=text_of(x.shape))
    total: Size = 0
    for x in inputs:
        total = total + x.shape[axis]
    return (*first.shape[:axis], total, *first.shape[axis + 1:]), first.dtype


def _pad(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    return tuple(b + s + a for b, s, a in zip(attrs["before"], inputs[0].shape, attrs["after"])), inputs[0].dtype


def _windows(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    shape = list(inputs[0].shape)
    for axis, size, stride, dilation in zip(*(attrs[n] for n in ("axes", "sizes", "strides", "dilations"))):
        span = (size - 1) * dilation + 1
        if isinstance(shape[axis], int) and shape[axis] < span:
            raise error("program-windows", f"windows of {span} elements do not fit {shape[axis]} along axis {axis}",
                        expected=f"at most {shape[axis]} elements", found=str(span))
        shape[axis] = (shape[axis] - span) // stride + 1
    return (*shape, *attrs["sizes"]), inputs[0].dtype


def _indices(inputs: Sequence[Node], what: str) -> None:
    if not inputs[1].dtype.is_int:
        raise error("program-gather", f"{what} takes integers as indices, found {inputs[1].dtype}", expected="integers")


def _gather(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    x, i = inputs
    _indices(inputs, "T.gather")
    axis = attrs["axis"]
    return (*x.shape[:axis], *i.shape, *x.shape[axis + 1:]), x.dtype


def _take_along(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    x, i = inputs
    _indices(inputs, "T.take_along")
    if x.ndim != i.ndim or any(s != t for k, (s, t) in enumerate(zip(x.shape, i.shape)) if k != attrs["axis"]):
        raise error("program-gather", f"T.take_along: indices {text_of(i.shape)} do not fit {text_of(x.shape)}",
                    expected=f"the shape of the tensor, but for axis {attrs['axis']}", found=text_of(i.shape))
    return i.shape, x.dtype


def _dequantise(inputs: Sequence[Node], attrs: Attrs) -> tuple[Shape, dtype]:
    q, s = inputs[:2]
    shape = (*q.shape[:-1], q.shape[-1] * FORMATS[attrs["format"]][0])
    for other in inputs[1:]:
        if len(other.shape) != len(shape) or any(t * g != n for t, g, n in zip(other.shape, attrs["groups"], shape)):
            raise error("program-quantised", f"scales {text_of(other.shape)} do not cut weights {text_of(shape)} into groups",
                        expected="an extent that divides the weights' along each axis", found=text_of(other.shape))
    return shape, s.dtype


RULES: dict[str, Rule] = {
    **{op: _unary(op) for op in UNARY}, **{op: _binary(op) for op in (*BINARY, *COMPARE)}, "where": _where,
    "reduce": _reduce, "argreduce": _argreduce, "einsum": _einsum, "reshape": _reshape, "transpose": _transpose,
    "slice": _given, "broadcast": _given, "concat": _concat, "pad": _pad, "windows": _windows, "gather": _gather,
    "take_along": _take_along, "scan": _same, "argsort": _argsort, "argtopk": _argtopk, "dequantise": _dequantise,
}
