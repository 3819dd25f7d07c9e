"""MatmulProblem: a checked call of matmul or grouped_matmul."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from tilelang.errors import register
from tilelang.ir import dtype
from tilelang.language.tracing.state import error
from tilelang.target import Target

from ..agreement import overlap
from ..arrays import expects_gradient, place, type_name
from .kernels import ACTIVATIONS, Form
from .operands import Operand, operand
from .tile import Tile

register("matmul-shape", ValueError, "operands of a library GEMM whose shapes do not fit together",
         expected="operands whose shapes go together")
register("matmul-type", TypeError, "element types a library GEMM does not take", expected="element types that the GEMM takes")
register("matmul-option", ValueError, "an option of a library GEMM that it does not have",
         expected="an option that the GEMM has")
register("matmul-device", ValueError, "operands of a library GEMM on different devices", expected="operands on one device")
register("matmul-gradient", RuntimeError, "a library GEMM is asked for a gradient, which it does not compute",
         "call it under torch.no_grad(), or pass tensors without requires_grad",
         expected="operands without requires_grad, or torch.no_grad()")

_FP8 = ("float8_e4m3fn", "float8_e5m2")
# operand type -> (kind, accumulator, default result type)
TYPES = {"float16": ("half", "float32", "float16"), "bfloat16": ("half", "float32", "bfloat16"),
          "float32": ("tf32", "float32", "float32"), "float64": ("float", "float64", "float64"),
          "int8": ("int8", "int32", "int32"), "uint8": ("int8", "int32", "int32"),
          **{f: ("fp8", "float32", "bfloat16") for f in _FP8}}
register("matmul-target", ValueError, "element types that the target's MMA does not have",
         expected="element types that the target's MMA has")


@dataclass(frozen=True)
class MatmulProblem:
    """A call of matmul or grouped_matmul: everything that decides which kernel answers it, without the values.

    op(a) of m x k by op(b) of k x n, in `batch` copies (0: no batch dimension). types: of a, b, the result, the accumulator.
    kind: "half", "tf32", "fp8", "int8" or "float" (no tensor cores). left, right: how a and b are stored. two_level: partial
    sums of a step of k are added to a second accumulator. shared_b: one b for the batch. bias: its type, "" for none. scaling:
    Form.scaling. groups: of grouped_matmul. dynamic: the kernel should take any number of rows, where it can; open_rows: it
    does, and m is the number that its tiles are chosen for.
    """

    m: int
    n: int
    k: int
    types: tuple[str, str, str, str]
    kind: str
    left: Operand
    right: Operand
    two_level: bool = False
    batch: int = 0
    shared_b: bool = False
    bias: str = ""
    activation: str = ""
    scaling: str = ""
    groups: int = 0
    dynamic: bool = False
    open_rows: bool = False

    def form(self, tile: Tile) -> Form:
        """The form of a kernel with these tiles."""
        return Form(self.m, self.n, self.k, self.types, tile, self.batch, self.left.transposed, self.right.transposed,
                    self.left.strides, self.right.strides, self.shared_b, self.bias, self.activation, self.scaling, self.groups,
                    self.open_rows)


def matmul_problem(tensors: Mapping[str, Any], target: Target, *, transpose_a: bool, transpose_b: bool, activation: str | None,
                   out_dtype: Any, fast_accum: bool, dynamic: bool = False) -> MatmulProblem:
    """The problem of a call of matmul.

    tensors: a, b, bias, scale_a, scale_b, out; all but the first two are None where left out. Raises matmul-shape, matmul-type,
    matmul-option, matmul-device.
    """
    a, b, bias, scale_a, scale_b, out = (tensors[x] for x in ("a", "b", "bias", "scale_a", "scale_b", "out"))
    left, right = operand(a, "a", transpose_a), operand(b, "b", transpose_b)
    types = check_types(a, b, out_dtype)
    m, n, k = _check_shapes(left, right)
    if b.ndim == 3 and (a.ndim == 2 or a.shape[0] != b.shape[0]):
        raise error("matmul-shape", f"a has shape {tuple(a.shape)}, b a batch of {b.shape[0]}",
                    expected="one batch, or a b without batch", found=f"{tuple(a.shape)} and {tuple(b.shape)}",
                    hint="both have one batch, or b is one matrix for all of a")
    kind = TYPES[types[0]][0]
    scaling = _check_scales(scale_a, scale_b, kind, (m, n, k), a.ndim == 3)
    _check_rest(a, {"b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "out": out}, n, bias, activation)
    shape = result_shape(a, m, n)
    _check_out(out, shape, types[2])
    two_level = kind == "fp8" and (scaling == "block" or not fast_accum and k > 128 and target.is_gpu)
    return MatmulProblem(m, n, k, types, kind, left, right, two_level, left.batch, bool(left.batch and not right.batch),
                         "" if bias is None else type_name(bias), activation or "", scaling, dynamic=dynamic)


def grouped_problem(tensors: Mapping[str, Any], target: Target, *, transpose_b: bool, activation: str | None,
                    out_dtype: Any, dynamic: bool = False) -> MatmulProblem:
    """The problem of a call of grouped_matmul.

    tensors: a, b, bias, group_sizes, out; bias and out are None where left out.  Raises matmul-shape, matmul-type,
    matmul-option, matmul-device.
    """
    a, b, bias, sizes, out = (tensors[x] for x in ("a", "b", "bias", "group_sizes", "out"))
    types = check_types(a, b, out_dtype)
    if a.ndim != 2 or b.ndim != 3:
        raise error("matmul-shape", f"a has {a.ndim} dimensions and b {b.ndim}, expected 2 and 3",
                    expected="2 and 3 dimensions", found=f"{a.ndim} and {b.ndim}",
                    hint="rows of all groups one after another; one matrix of b a group")
    left, right = operand(a, "a", False), operand(b, "b", transpose_b)
    m, n, k = _check_shapes(left, right)
    if tuple(sizes.shape) != (b.shape[0],) or type_name(sizes) != "int32":
        raise error("matmul-shape", f"group_sizes is ‹{type_name(sizes)} {tuple(sizes.shape)}›, expected «int32 "
                    f"({b.shape[0]},)»", hint="one size a matrix of b: group_sizes.int()")
    _check_rest(a, {"b": b, "bias": bias, "group_sizes": sizes, "out": out}, n, bias, activation)
    _check_out(out, (m, n), types[2])
    if 0 in (n, k) or not right.batch:
        raise error("matmul-shape", f"a grouped GEMM of {m} x {k} by {right.batch} matrices of {k} x {n} has no work",
                    expected="columns and groups", found=f"{m} x {k} by {right.batch} of {k} x {n}",
                    hint="call it with columns and groups")
    kind = TYPES[types[0]][0]
    return MatmulProblem(m, n, k, types, kind, left, right, kind == "fp8" and k > 128 and target.is_gpu,
                         bias="" if bias is None else type_name(bias), activation=activation or "",
                         groups=right.batch, dynamic=dynamic)


def result_shape(a: Any, m: int, n: int) -> tuple[int, ...]:
    """The shape of the result of matmul for m x n matrices."""
    return (*(int(x) for x in a.shape[:-2]), m, n)


def check_target(p: MatmulProblem, target: Target) -> None:
    """Check the target. Raises matmul-target."""
    if p.kind == "fp8" and target.is_gpu and not target.has_fp8_mma:
        raise error("matmul-target", f"there is no MMA of {p.types[0]} on ‹{target.arch}›", expected="sm_89 or newer, gfx950",
                    hint="sm_89 and newer and gfx950 have it; convert the operands to float16")


def check_gradient(name: str, *operands: Any) -> None:
    """Raises matmul-gradient where torch would record a gradient. name: the function's. operands: torch tensors, or None."""
    if expects_gradient(*operands):
        raise error("matmul-gradient", f"{name} computes no gradient, but an operand requires one",
                    found="an operand that requires a gradient")


def check_tensors(given: Iterable[Any]) -> None:
    """Raises matmul-type for the first object that is no tensor."""
    for x in given:
        if not (isinstance(x, np.ndarray) or hasattr(x, "stride") and hasattr(x, "data_ptr")):
            raise error("matmul-type", f"operands are «torch tensors or NumPy arrays», found {type(x).__name__}",
                        hint="pass torch.from_numpy(x) or np.asarray(x)")


def check_disjoint(out: Any, others: dict[str, Any]) -> None:
    """Raises matmul-option if `out` overlaps an operand: tiles of the result are written while others still read the operands.
    """
    for name, x in others.items():
        if x is not None and overlap(out, x):
            raise error("matmul-option", f"out and {name} have memory in common",
                        expected="separate memory", found=f"memory of {name}", hint="leave out out, or pass a copy")


def check_types(a: Any, b: Any, out_dtype: Any) -> tuple[str, str, str, str]:
    """The types (a, b, result, accumulator). Raises matmul-type."""
    ta, tb = type_name(a), type_name(b)
    if ta not in TYPES or not (ta == tb or ta in _FP8 and tb in _FP8):
        raise error("matmul-type", f"there is no GEMM of ‹{ta} and {tb}›", expected="operands of one type, or both float8",
                    hint="operands have one type, or are both float8; types: " + ", ".join(TYPES))
    _, acc, result = TYPES[ta]
    if out_dtype is not None:
        name = out_dtype.__name__ if isinstance(out_dtype, type) else str(out_dtype)
        result = f"{dtype(name.rpartition('.')[2])}"
    if not (dtype(result).is_float or result == acc):
        raise error("matmul-type", f"a GEMM of {ta} has no result of ‹{result}›", expected=f"{acc} or a floating-point type",
                    hint=f"{acc} and floating-point results exist")
    return ta, tb, result, acc


def _check_shapes(a: Operand, b: Operand) -> tuple[int, int, int]:
    """(m, n, k). Raises matmul-shape."""
    (m, k), (k_b, n) = a.logical, b.logical
    if k != k_b:
        raise error("matmul-shape", f"op(a) is {m} x {k} and op(b) {k_b} x {n}: the inner sizes differ",
                    expected="one inner size", found=f"{k} and {k_b}",
                    hint="pass transpose_a=True or transpose_b=True for operands stored the other way round")
    return m, n, k


def _check_scales(scale_a: Any, scale_b: Any, kind: str, sizes: tuple[int, int, int], batch: bool) -> str:
    """The kind of scaling, Form.scaling. Raises matmul-shape, matmul-option, matmul-type."""
    if scale_a is None and scale_b is None:
        return ""
    if kind not in ("fp8", "int8") or scale_a is None or scale_b is None:
        raise error("matmul-option", "scale_a and scale_b belong to GEMMs of float8 or int8, both of them",
                    expected="both scales, with operands of float8 or int8",
                    found=f"{sum(x is not None for x in (scale_a, scale_b))} scales with {kind}",
                    hint="multiply the result, or pass the other scale too")
    for x in (scale_a, scale_b):
        if type_name(x) != "float32":
            raise error("matmul-type", f"scales are «float32», found {type_name(x)}", hint="convert the scales")
    found, (m, n, k) = (tuple(scale_a.shape), tuple(scale_b.shape)), sizes
    if all(s in ((), (1,), (1, 1)) for s in found):
        return "tensor"
    blocks = (m, ceil(k / 128)), (ceil(n / 128), ceil(k / 128))
    if kind != "fp8" or found != blocks or batch:
        raise error("matmul-shape", f"scales of shapes {found[0]} and {found[1]}, expected (1,) and (1,)" +
                    (f", or {blocks[0]} and {blocks[1]}" if kind == "fp8" and not batch else ""),
                    expected="(1,) and (1,), or one scale a block of 128", found=f"{found[0]} and {found[1]}",
                    hint="one scale a tensor; or one for 128 of k of a row of op(a) and for 128 x 128 of op(b)")
    return "block"


def _check_out(out: Any, shape: tuple[int, ...], element: str) -> None:
    """Check the tensor for the result.  Raises matmul-shape."""
    if out is not None and (tuple(out.shape) != shape or type_name(out) != element):
        raise error("matmul-shape", f"out is ‹{type_name(out)} {tuple(out.shape)}›, expected «{element} {tuple(shape)}»",
                    hint="leave out out")


def _check_rest(a: Any, others: dict[str, Any], n: int, bias: Any, activation: str | None) -> None:
    """Check bias, out and devices. Raises matmul-device, matmul-shape, matmul-option, matmul-type."""
    for name, x in others.items():
        if x is not None and place(x) != place(a):
            raise error("matmul-device", f"a is on {place(a)}, {name} on ‹{place(x)}›", expected=f"{name} on {place(a)}",
                        hint="move the operands to one device")
    if bias is not None and tuple(bias.shape) != (n,):
        raise error("matmul-shape", f"bias has shape ‹{tuple(bias.shape)}›, expected «({n},)»", hint="one bias a column")
    if bias is not None and not dtype(type_name(bias)).is_float:
        raise error("matmul-type", f"bias is of ‹{type_name(bias)}›", expected="a floating-point type",
                    hint="pass a floating-point bias")
    if activation is not None and activation not in ACTIVATIONS:
        raise error("matmul-option", f"there is no activation ‹{activation!r}›", expected=f"one of {', '.join(ACTIVATIONS)}",
                    hint="one of " + ", ".join(ACTIVATIONS))
