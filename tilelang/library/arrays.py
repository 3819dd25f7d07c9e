"""What the library needs to know of torch tensors and NumPy arrays, without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from tilelang.ir import dtype, numpy_dtype
from tilelang.target import Target, determine_target


def is_numpy(x: Any) -> bool:
    """Whether x is a NumPy array (else a torch tensor)."""
    return isinstance(x, np.ndarray)


def facts(x: Any) -> tuple[Any, ...]:
    """All of a tensor that checks and choices of the library look at, besides the values: a key.  Raises AttributeError for
    what is no tensor."""
    if isinstance(x, np.ndarray):
        return x.shape, x.strides, x.dtype, "numpy", aligned(x)
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15 == 0


def expects_gradient(*inputs: Any) -> bool:
    """Whether torch would keep what it needs for a gradient of these tensors, some of which may be None."""
    for x in inputs:
        if x is not None and x.requires_grad and sys.modules["torch"].is_grad_enabled():
            return True
    return False


def type_name(x: Any) -> str:
    """Element type of a tensor as the language calls it."""
    return x.dtype.name if is_numpy(x) else str(x.dtype).rpartition(".")[2]


def strides(x: Any) -> tuple[int, ...]:
    """In elements."""
    return tuple(s // x.itemsize for s in x.strides) if is_numpy(x) else tuple(x.stride())


def aligned(x: Any, bytes_: int = 16) -> bool:
    """Whether the first element's address is a multiple of `bytes_`."""
    return bool((x.ctypes.data if is_numpy(x) else x.data_ptr()) % bytes_ == 0)


def strided(x: Any) -> bool:
    """Whether a tensor can name where its elements lie: steps of whole elements, none backwards."""
    return not is_numpy(x) or all(s >= 0 and s % x.itemsize == 0 for s in x.strides)


def place(x: Any) -> Any:
    """The device of a tensor, "numpy" for arrays."""
    return "numpy" if is_numpy(x) else x.device


def maker(like: Any, shape: tuple[int, ...], element: str) -> Callable[[], Any]:
    """A function that makes tensors of the kind and on the device of `like`, any contents."""
    if is_numpy(like):
        return partial(np.empty, shape, numpy_dtype(dtype(element)))
    torch = sys.modules["torch"]
    steps = [prod(max(1, n) for n in shape[d + 1:]) for d in range(len(shape))]  # with them torch takes 2.1 us, without 3.4
    return partial(torch.empty_strided, tuple(shape), steps, dtype=getattr(torch, element), device=like.device)


def empty(like: Any, shape: tuple[int, ...], element: str) -> Any:
    """A tensor of the kind and on the device of `like`, any contents."""
    return maker(like, shape, element)()


def zeros(like: Any, shape: tuple[int, ...], element: str) -> Any:
    """The same, of zeros."""
    out = empty(like, shape, element)
    if is_numpy(out):
        out.fill(0)
    else:
        out.zero_()
    return out


def zeros_laid(like: Any, shape: tuple[int, ...], steps: tuple[int, ...], element: str) -> Any:
    """The same with strides, in elements."""
    flat = zeros(like, (1 + sum((n - 1) * s for n, s in zip(shape, steps)),), element)
    if is_numpy(flat):
        return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * flat.itemsize for s in steps))
    return flat.as_strided(shape, steps)


def fresh(x: Any) -> Any:
    """A compact copy at an aligned address."""
    return x.copy() if is_numpy(x) else x.clone()


def left_of(x: Any, columns: int) -> Any:
    """A view of the first columns.  torch's narrow takes a third of the time that its indexing does."""
    return x[..., :columns] if is_numpy(x) else x.narrow(-1, 0, columns)


def target_of(x: Any) -> Target:
    """What kernels for a tensor are compiled for: the GPU at hand for CUDA tensors, else the CPU."""
    if not is_numpy(x) and x.device.type == "cuda":
        found: Target = determine_target("cuda", return_object=True)
        return found
    return Target("cpu")


__all__ = ["aligned", "empty", "expects_gradient", "facts", "fresh", "is_numpy", "left_of", "maker", "place", "strided",
           "strides", "target_of", "type_name", "zeros", "zeros_laid"]
