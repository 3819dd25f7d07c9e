"""Checks of the attention functions' arrays: element types, readable strides, device and target."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.jit import JITKernel
from tilelang.target import Target

from ..agreement import Disjoint, overlap
from ..arrays import aligned, compact, compact_copy, expects_gradient, is_numpy, strides, type_name
from ..place import Place

register("attention-argument", TypeError, "an argument of an attention function is of no kind it takes",
         "pass torch tensors or NumPy arrays of float16, bfloat16 or float32",
         expected="torch tensors or NumPy arrays of float16, bfloat16 or float32, all of one kind")
register("attention-shape", ValueError, "shapes, types or devices of the tensors of an attention function do not go together",
         expected="tensors whose shapes, types and devices go together")
register("attention-option", ValueError, "an option of an attention function has no meaning",
         expected="an option that has a meaning")
register("attention-gradient", RuntimeError, "an attention function is asked for a gradient, which it does not compute",
         "call it under torch.no_grad(), or pass tensors without requires_grad",
         expected="inputs without requires_grad, or torch.no_grad()")

DTYPES = ("float16", "bfloat16", "float32")
UNIT = 8  # 16-bit elements in 16 bytes: strides are multiples of it


def check_disjoint(disjoint: Disjoint, out: Any, q: Any, others: dict[str, Any]) -> None:
    """Raises attention-option if `out` overlaps k or v. disjoint: the test of `out`, made for q and the others.

    Rows of the result are written while other blocks still read keys and values. A tile's own queries have been read by then,
    so `out` may be q itself.
    """
    if disjoint.surely(out, (q, *others.values())):
        return
    for name, x in {"q": q, **others}.items():
        if not (name == "q" and _place(out) == _place(x)) and overlap(out, x):
            raise error("attention-option", f"out and {name} have memory in common", expected="separate memory, or all of q",
                        found=f"memory of {name}", hint="leave it out, or pass a copy")


def _place(x: Any) -> tuple[Any, ...]:
    """(address of the first element, strides) of a tensor."""
    start = x.ctypes.data if is_numpy(x) else x.data_ptr()
    return start, *((n, step) for n, step in zip(x.shape, strides(x)) if n > 1)


def device_of(x: Any) -> Any:
    """torch's device of a tensor, "the CPU" for NumPy arrays."""
    return "the CPU" if is_numpy(x) else x.device


def check_tensors(name: str, given: Mapping[str, Any], floats: tuple[str, ...], optional: tuple[str, ...] = (),
                  double: bool = False) -> None:
    """Raises attention-argument unless all are torch tensors or all are NumPy arrays.

    name: the function's. given: arguments by name. floats: names of those that are not indices. optional: of those that may be
    None. double: whether float64 is taken too, on the CPU.
    """
    torch, given = sys.modules.get("torch"), {n: x for n, x in given.items() if x is not None or n not in optional}
    if not all(is_numpy(x) for x in given.values()) and (torch is None or not all(
            isinstance(x, torch.Tensor) for x in given.values())):
        foreign = [n for n, x in given.items() if not is_numpy(x) and (torch is None or not isinstance(x, torch.Tensor))]
        other = foreign[0] if foreign else next(n for n, x in given.items() if is_numpy(x) != is_numpy(given["q"]))
        kind = type(given[other]).__name__
        raise error("attention-argument", f"{name} takes «torch tensors or NumPy arrays, all of one kind»; {other} is a {kind}",
                    found=f"{other}, a {kind}")
    for n in floats:
        if type_name(given[n]) not in (DTYPES + ("float64",) * (double and type_name(given[floats[0]]) == "float64")):
            wanted = "float16, bfloat16 or float32" + ", or float64 on the CPU" * double
            raise error("attention-argument", f"{n} has elements of ‹{type_name(given[n])}›, expected «{wanted}»")


def check_like(kind: str, name: str, first: Any, others: Mapping[str, tuple[Any, tuple[int, ...], str]], after: str = "",
               differentiable: bool = False, **more: Any) -> None:
    """Check the tensors of a function against its first one.

    others: name -> (tensor, its shape, its type). after: behind what is expected. Raises errors of this kind, with `more`, and
    attention-gradient unless the function is differentiable.
    """
    for what, (x, shape, element) in others.items():
        if (is_numpy(x), tuple(x.shape), type_name(x), device_of(x)) != (is_numpy(first), shape, element, device_of(first)):
            raise error(kind, f"{what} of {name} is {type_name(x)} {tuple(x.shape)} on {device_of(x)}",
                        expected=f"{element} {shape} on {device_of(first)}{after}",
                        found=f"{type_name(x)} {tuple(x.shape)}", **more)
    if not differentiable:
        check_gradient(name, first, *(x for x, _, _ in others.values()))


def check_double(kind: str, name: str, x: Any, at: Place) -> None:
    """Raises an error of this kind for float64 on a GPU."""
    if at.target.is_gpu and type_name(x) == "float64":
        raise error(kind, f"{name} takes ‹float64› on the CPU only", expected="float16 or bfloat16")


def check_gradient(name: str, *inputs: Any) -> None:
    """Raises attention-gradient where torch would record a gradient. inputs: tensors, or None."""
    if expects_gradient(*inputs):
        raise error("attention-gradient", f"{name} computes no gradient, but an input requires one",
                    found="an input that requires a gradient")


def check_scale(scale: Any) -> float:
    """The factor of the scores. Raises attention-option unless it is positive and finite (it is moved into exponents)."""
    try:
        value = float(scale)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 < value < math.inf:
        raise error("attention-option", f"scale must be positive and finite, found {scale}",
                    expected="a positive, finite number", hint="scale the queries instead")
    return value


def check_heads(heads: int, kv_heads: int, dim: int, dim_v: int, unit: int = 16) -> None:
    """Check the numbers of heads and the head dimensions. Raises attention-shape."""
    if kv_heads == 0 or heads % kv_heads:
        raise error("attention-shape", f"‹{heads}› query heads are no multiple of {kv_heads} kv heads",
                    expected=f"a multiple of {kv_heads} query heads", hint="each kv head serves the same number of query heads")
    for name, n in (("head dimension of q and k", dim), ("head dimension of v", dim_v)):
        if n % unit or not 0 < n <= 256:
            raise error("attention-shape", f"the {name} must be «a multiple of {unit} up to 256», found {n}",
                        hint="pad with zeros: they change neither scores nor the other columns of the result")


def with_whole_heads(attend: Callable[..., Any], q: Any, k: Any, v: Any, scale: float | None, out: Any = None,
                     unit: int = 16) -> Any:
    """What `attend(q, k, v, scale)` gives for heads with zeros up to multiples of `unit` elements, without their columns.

    None where nothing is to be added, or cannot be. The zeros are copied; they change neither scores nor the first columns of
    a result. out: where the result goes. Raises attention-shape unless it has the result's shape.
    """
    try:
        dim, dim_v = q.shape[-1], v.shape[-1]
        if not (dim % unit or dim_v % unit):  # what most calls come to
            return None
        dims = dim, k.shape[-1], dim_v
    except (AttributeError, IndexError):  # no tensors with elements of a head: the checks of the function name them
        return None
    if dims[0] != dims[1] or not all(0 < n <= 256 for n in dims):
        return None
    wanted = (*q.shape[:-1], dim_v)
    if out is not None and tuple(getattr(out, "shape", ())) != wanted:
        raise error("attention-shape", f"`out` is no tensor of shape {wanted}", expected=f"a tensor of shape {wanted}",
                    found=str(tuple(getattr(out, "shape", ()))), hint="leave it out, or give it the shape of the result")
    found = attend(*(_with_zeros(x, -n % unit) for x, n in zip((q, k, v), dims)), dim ** -0.5 if scale is None else scale)
    result, *logs = found if isinstance(found, tuple) else (found,)
    result = result[..., :dim_v]
    if out is not None:
        out[...] = result
        result = out
    return (result, *logs) if logs else result


def _with_zeros(x: Any, columns: int) -> Any:
    if columns == 0:
        return x
    if is_numpy(x):
        return np.concatenate((x, np.zeros((*x.shape[:-1], columns), x.dtype)), -1)
    return sys.modules["torch"].nn.functional.pad(x, (0, columns))


def check_alike(q: Any, others: Mapping[str, Any]) -> None:
    """Check that types and devices are those of q. Raises attention-shape. others: by name, None where left out."""
    for name, x in others.items():
        if x is not None and (type_name(x) != type_name(q) or device_of(x) != device_of(q)):
            raise error("attention-shape", f"q is {type_name(q)} on {device_of(q)}, {name} is ‹{type_name(x)} on "
                        f"{device_of(x)}›", expected=f"{name} of {type_name(q)} on {device_of(q)}",
                        hint="convert them to one type on one device")


def unit_of(kind: str) -> int:
    """What strides of elements of this type are a multiple of: 8, those of 8 bits 16."""
    return 16 if kind.startswith("float8") else UNIT


def strides_of(x: Any, on_device: bool = False, unit: int = 0) -> tuple[int, ...] | None:
    """The strides in elements; None where a kernel cannot read the array as it is stored.

    Dimensions of one element get the strides of a contiguous array. on_device: the array must also start at a multiple of 16
    bytes. unit: what they are multiples of; 0: unit_of the elements.
    """
    if on_device and not aligned(x):
        return None
    return _readable(strides(x), x.shape, unit or unit_of(type_name(x)))


def readable(x: Any, on_device: bool) -> Any:
    """x, or a copy, for a kernel that gets strides with each call.  on_device: as for strides_of.

    A dimension of one element may have any stride, also one that is no multiple of the unit: such a view gets that of a
    contiguous array.
    """
    own, unit = strides(x), unit_of(type_name(x))
    steps = _readable(own, x.shape, unit)
    if steps is None or on_device and not aligned(x):
        return compact_copy(x)
    if own == steps or all(s >= 0 and s % unit == 0 for s in own[:-1]):
        return x
    if is_numpy(x):
        return np.lib.stride_tricks.as_strided(x, x.shape, [s * x.itemsize for s in steps])
    return x.as_strided(x.shape, steps)


@lru_cache(4096)
def _readable(steps: tuple[int, ...], shape: tuple[int, ...], unit: int) -> tuple[int, ...] | None:
    out = tuple(c if n == 1 else s for s, c, n in zip(steps, compact(shape), shape))
    return out if out[-1] == 1 and all(s >= 0 and s % unit == 0 for s in out[:-1]) else None


def running_on(x: Any, target: Any) -> Place:
    """Where kernels for arrays like x run.

    target: the caller's; None is the device of the array. "tile" selects the reference interpreter. A CUDA target with arrays
    that are not on a GPU selects the device simulator.
    """
    if isinstance(target, str) and target in ("tile", "simulator"):
        return Place(Target("cpu" if target == "tile" else "cuda"), target)
    at = Place.of(x, target)
    if at.backend or not at.target.is_gpu or not is_numpy(x) and x.device.type == "cuda":
        return at
    return replace(at, backend="simulator")


def fast_kernel(at: Place, make: Callable[..., Any], *form: Any, **configs: Any) -> JITKernel:
    """Place.kernel with exp2 and log2 by hardware instructions."""
    return at.kernel(make, *form, enable_fast_math=at.target.is_gpu or None, **configs)


def fitting_kernel(at: Place, make: Callable[[Any], Any], *forms: Any) -> tuple[Any, JITKernel]:
    """The first form for which a block of the target has room, and its kernel, as fast_kernel compiles it."""
    return at.fitting(make, forms, enable_fast_math=at.target.is_gpu or None)
