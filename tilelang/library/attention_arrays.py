"""What the attention functions ask of arrays: element types, strides a kernel can read, where to run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.target import Target

from .arrays import is_numpy, strides, type_name

register("attention-argument", TypeError, "an argument of an attention function is of no kind it takes",
         hint="pass float16 or bfloat16 torch tensors, or NumPy arrays")

DTYPES = ("float16", "bfloat16")
UNIT = 8  # elements of 16 bytes: what strides are multiples of


def facts(x: Any) -> tuple[Any, ...]:
    """What decides the kernel for an array: a key."""
    if is_numpy(x):
        return x.shape, x.strides, x.dtype
    return x.shape, x.stride(), x.dtype, x.device


def device_of(x: Any) -> Any:
    """torch's device, "the CPU" for NumPy arrays."""
    return "the CPU" if is_numpy(x) else x.device


def framework(name: str, given: Mapping[str, Any], halves: tuple[str, ...]) -> Any:
    """The torch module for torch tensors, None for NumPy arrays.

    name: of the function.  given: arguments by name, without those left out.  halves: which of them are 16-bit floats.
    Raises attention-argument.
    """
    torch = sys.modules.get("torch")
    if all(is_numpy(x) for x in given.values()):
        torch = None
    elif torch is None or not all(isinstance(x, torch.Tensor) for x in given.values()):
        first = next(iter(given.values()))
        other = next(f"{n} is a {type(x).__name__}" for n, x in given.items()
                     if torch is None or not isinstance(x, torch.Tensor) or not isinstance(first, torch.Tensor))
        raise error("attention-argument", f"{name} takes torch tensors or NumPy arrays, all of one kind; {other}")
    for n in halves:
        if type_name(given[n]) not in DTYPES:
            raise error("attention-argument", f"{n} has elements of {type_name(given[n])}, expected float16 or bfloat16")
    return torch


def compact(shape: Any) -> tuple[int, ...]:
    """Strides, in elements, of an array without gaps."""
    out = [1]
    for n in reversed(shape[1:]):
        out.insert(0, out[0] * max(1, int(n)))
    return tuple(out)


def strides_of(x: Any) -> tuple[int, ...] | None:
    """Strides in elements, those of single elements as if compact; None where a kernel cannot read the array as it lies."""
    out = tuple(c if n == 1 else s for s, c, n in zip(strides(x), compact(x.shape), x.shape))
    return out if out[-1] == 1 and all(s >= 0 and s % UNIT == 0 for s in out[:-1]) else None


def readable(x: Any, usable: bool, torch: Any) -> Any:
    """The array, or a copy where it does not lie as kernels need it.  usable: whether its strides do."""
    if torch is None:
        return x if usable else np.ascontiguousarray(x)
    return x if usable and not x.data_ptr() & 15 else x.clone(memory_format=torch.contiguous_format)


@cache
def _device(index: int) -> tuple[Target, str | None, int | None]:
    """(target, execution backend, processors) of a CUDA device of torch."""
    found = sys.modules["torch"].cuda.get_device_properties(index)
    number = found.major * 10 + found.minor
    try:
        target = Target({"kind": "cuda", "arch": f"sm_{number}a" if number >= 90 else f"sm_{number}"})
    except ValueError:  # newer than the table: what Target finds for it
        target = Target("cuda")
    return target, None, found.multi_processor_count


def running_on(x: Any, target: Any) -> tuple[Target, str | None, int | None]:
    """(target, execution backend, processors where known) for arrays like x.

    target: what the caller asks for; None is the device of the array.  "tile" interprets the tile program; a CUDA target
    with arrays that are not on a GPU is simulated.
    """
    on_device = not is_numpy(x) and x.device.type == "cuda"
    if target is None:
        return _device(x.device.index) if on_device else (Target("cpu"), None, None)
    if isinstance(target, str) and target in ("tile", "simulator"):
        return Target("cpu" if target == "tile" else "cuda"), target, None
    resolved = target if isinstance(target, Target) else Target(target)
    return resolved, "simulator" if resolved.is_cuda and not on_device else None, None


def configs(target: Target) -> dict[str, Any]:
    """Pass configs of attention: exp2 and log2 by the hardware's instructions; wgmma and TMA where there are."""
    if not target.is_cuda:
        return {}
    return {"tl.enable_fast_math": True, **({"tl.enable_hopper": True} if target.has_wgmma else {})}


__all__ = ["DTYPES", "UNIT", "compact", "configs", "device_of", "facts", "framework", "readable", "running_on", "strides_of"]
