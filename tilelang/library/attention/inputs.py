"""Checks of the attention functions' arrays: element types, readable strides, device and target."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.runtime.cpus import usable_cpus
from tilelang.target import Target

from ..agreement import Disjoint, overlap
from ..arrays import aligned, expects_gradient, is_numpy, strides, type_name

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


def check_tensors(name: str, given: Mapping[str, Any], floats: tuple[str, ...]) -> None:
    """Raises attention-argument unless all are torch tensors or all are NumPy arrays.

    name: the function's. given: arguments by name, without those left out. floats: names of those that are not indices.
    """
    torch = sys.modules.get("torch")
    if not all(is_numpy(x) for x in given.values()) and (torch is None or not all(
            isinstance(x, torch.Tensor) for x in given.values())):
        foreign = [n for n, x in given.items() if not is_numpy(x) and (torch is None or not isinstance(x, torch.Tensor))]
        other = foreign[0] if foreign else next(n for n, x in given.items() if is_numpy(x) != is_numpy(given["q"]))
        kind = type(given[other]).__name__
        raise error("attention-argument", f"{name} takes torch tensors or NumPy arrays, all of one kind; {other} is a {kind}",
                    expected="torch tensors or NumPy arrays, all of one kind", found=f"{other}, a {kind}")
    for n in floats:
        if type_name(given[n]) not in DTYPES:
            wanted = "float16, bfloat16 or float32"
            raise error("attention-argument", f"{n} has elements of {type_name(given[n])}, expected {wanted}",
                        expected=wanted, found=type_name(given[n]))


def check_gradient(name: str, *inputs: Any) -> None:
    """Raises attention-gradient where torch would record a gradient. inputs: torch tensors."""
    if expects_gradient(*inputs):
        raise error("attention-gradient", f"{name} computes no gradient, but an input requires one",
                    found="an input that requires a gradient")


def check_scale(scale: Any) -> float:
    """The factor of the scores. Raises attention-option unless it is positive and finite (it is moved into exponents)."""
    scale = float(scale)
    if not 0.0 < scale < math.inf:
        raise error("attention-option", f"scale must be positive and finite, found {scale}",
                    expected="a positive, finite number", hint="scale the queries instead")
    return scale


def check_heads(heads: int, kv_heads: int, dim: int, dim_v: int) -> None:
    """Check the numbers of heads and the head dimensions. Raises attention-shape."""
    if kv_heads == 0 or heads % kv_heads:
        raise error("attention-shape", f"{heads} query heads are no multiple of {kv_heads} kv heads",
                    expected=f"a multiple of {kv_heads} query heads", found=str(heads),
                    hint="each kv head serves the same number of query heads")
    for name, n in (("head dimension of q and k", dim), ("head dimension of v", dim_v)):
        if n % 16 or not 0 < n <= 256:
            raise error("attention-shape", f"the {name} must be a multiple of 16 up to 256, found {n}",
                        expected="a multiple of 16 up to 256",
                        hint="pad with zeros: they change neither scores nor the other columns of the result")


def check_alike(q: Any, others: Mapping[str, Any]) -> None:
    """Check that types and devices are those of q. Raises attention-shape. others: by name, None where left out."""
    for name, x in others.items():
        if x is not None and (type_name(x) != type_name(q) or device_of(x) != device_of(q)):
            raise error("attention-shape", f"q is {type_name(q)} on {device_of(q)}, {name} is {type_name(x)} on {device_of(x)}",
                        expected=f"{name} of {type_name(q)} on {device_of(q)}", found=f"{type_name(x)} on {device_of(x)}",
                        hint="convert them to one type on one device")


def compact(shape: Any) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous array."""
    out = [1]
    for n in reversed(shape[1:]):
        out.insert(0, out[0] * max(1, int(n)))
    return tuple(out)


def strides_of(x: Any, on_device: bool = False) -> tuple[int, ...] | None:
    """The strides in elements; None where a kernel cannot read the array as it is stored.

    Dimensions of one element get the strides of a contiguous array. on_device: the array must also start at a multiple of 16
    bytes.
    """
    if on_device and not aligned(x):
        return None
    out = tuple(c if n == 1 else s for s, c, n in zip(strides(x), compact(x.shape), x.shape))
    return out if out[-1] == 1 and all(s >= 0 and s % UNIT == 0 for s in out[:-1]) else None


def compact_copy(x: Any) -> Any:
    """A contiguous copy, which kernels can read."""
    return np.ascontiguousarray(x) if is_numpy(x) else x.clone(memory_format=sys.modules["torch"].contiguous_format)


def contiguous(x: Any) -> Any:
    """x, or a copy that a kernel can read."""
    return x if strides(x) == compact(x.shape) and aligned(x) else compact_copy(x)


@cache
def _device(index: int) -> tuple[Target, str | None, int | None]:
    """(target, execution backend, SMs) of a CUDA device of torch."""
    found = sys.modules["torch"].cuda.get_device_properties(index)
    number = found.major * 10 + found.minor
    try:
        target = Target({"kind": "cuda", "arch": f"sm_{number}a" if number >= 90 else f"sm_{number}"})
    except ValueError:  # newer than the table of chips
        target = Target("cuda")
    return target, None, found.multi_processor_count


def running_on(x: Any, target: Any) -> tuple[Target, str | None, int | None]:
    """(target, execution backend, SMs where known) for arrays like x.

    target: the caller's; None is the device of the array. "tile" selects the reference interpreter. A CUDA target with arrays
    that are not on a GPU selects the device simulator.
    """
    on_device = not is_numpy(x) and x.device.type == "cuda"
    if target is None:
        return _device(x.device.index) if on_device else (Target("cpu"), None, usable_cpus())
    if isinstance(target, str) and target in ("tile", "simulator"):
        return Target("cpu" if target == "tile" else "cuda"), target, None
    resolved = target if isinstance(target, Target) else Target(target)
    return resolved, "simulator" if resolved.is_cuda and not on_device else None, None


def configs(target: Target) -> dict[str, Any]:
    """Pass configs of attention: exp2 and log2 by hardware instructions, and wgmma and TMA where the target has them."""
    if not target.is_cuda:
        return {}
    return {"tl.enable_fast_math": True, **({"tl.enable_hopper": True} if target.has_wgmma else {})}
