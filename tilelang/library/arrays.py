"""Properties of torch tensors and NumPy arrays, read without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tilelang.ir import dtype, numpy_dtype
from tilelang.target.machine import MAX_GRID

SEQUENCES = MAX_GRID[2] // 2  # of a launch: some kernels have two blocks for each along z, or more for a plan


def is_numpy(x: Any) -> bool:
    """Whether x is a NumPy array (else a torch tensor)."""
    return isinstance(x, np.ndarray)


def facts(x: Any) -> tuple[Any, ...] | None:
    """The properties of a tensor, besides its values, that the library's checks and choices read: a hashable key.

    None for None. Raises AttributeError for an object that is no tensor.
    """
    if x is None:
        return None
    if isinstance(x, np.ndarray):
        return x.shape, x.strides, x.dtype, "numpy", aligned(x)
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15 == 0


def expects_gradient(*inputs: Any) -> bool:
    """Whether torch would record a gradient for these tensors. All but the first may be None; NumPy arrays have none."""
    if isinstance(inputs[0], np.ndarray):
        return False
    for x in inputs:
        if x is not None and x.requires_grad and sys.modules["torch"].is_grad_enabled():
            return True
    ad = sys.modules["torch"].autograd.forward_ad  # tangents of forward mode
    return ad._current_level >= 0 and any(x is not None and ad.unpack_dual(x).tangent is not None for x in inputs)


def type_name(x: Any) -> str:
    """The name of a tensor's element type in the language, for example "float16"."""
    return _NAMES[x.dtype]


def accumulator(kind: str) -> str:
    """The type in which sums and logarithms of elements of a type are formed."""
    return "float64" if kind == "float64" else "float32"


class _Names(dict[Any, str]):
    """Element types of NumPy and torch -> their names."""

    def __missing__(self, key: Any) -> str:
        self[key] = key.name if isinstance(key, np.dtype) else str(key).rpartition(".")[2]
        return self[key]


_NAMES = _Names()


def strides(x: Any) -> tuple[int, ...]:
    """The strides of a tensor, in elements."""
    return tuple(s // x.itemsize for s in x.strides) if is_numpy(x) else tuple(x.stride())


def aligned(x: Any, bytes_: int = 16) -> bool:
    """Whether the address of the first element is a multiple of `bytes_`."""
    return bool((x.ctypes.data if is_numpy(x) else x.data_ptr()) % bytes_ == 0)


@lru_cache(4096)
def compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous array."""
    if not shape:
        return ()
    out = [1]
    for n in reversed(shape[1:]):
        out.insert(0, out[0] * max(1, int(n)))
    return tuple(out)


def strided(x: Any) -> bool:
    """Whether strides describe the tensor: whole elements, none negative."""
    return not is_numpy(x) or all(s >= 0 and s % x.itemsize == 0 for s in x.strides)


def place(x: Any) -> Any:
    """The device of a tensor, "numpy" for arrays."""
    return "numpy" if is_numpy(x) else x.device


def maker(like: Any, shape: tuple[int, ...], element: str) -> Callable[[], Any]:
    """A function that allocates uninitialised tensors of the kind and on the device of `like`."""
    if is_numpy(like):
        return partial(np.empty, shape, numpy_dtype(dtype(element)))
    torch = sys.modules["torch"]  # 2.1 us with strides, 3.4 without
    return partial(torch.empty_strided, shape, compact(tuple(shape)), dtype=getattr(torch, element), device=like.device)


def in_chunks(run: Callable[..., Any], most: int, *whole: Any) -> None:
    """run(*tensors) for at most `most` elements of their first dimension at a time.  A tensor may be None."""
    n = whole[0].shape[0]
    if n <= most:
        run(*whole)
        return
    for first in range(0, n, most):
        run(*(x if x is None else x[first:first + most] for x in whole))


def by_sequences(run: Callable[..., None], results: int) -> Callable[..., None]:
    """The function run(*arguments, *results) of so many results, for at most SEQUENCES sequences of the first argument at a
    time. Tensors of three dimensions and more have a sequence first; of others all pieces read, and results are sums."""
    def call(*args: Any) -> None:
        n = args[0].shape[0]
        if n <= SEQUENCES:
            run(*args)
            return
        for first in range(0, n, SEQUENCES):
            piece = [x[first:first + SEQUENCES] if getattr(x, "ndim", 0) > 2 else x for x in args]
            sums = [k for k in range(len(args) - results, len(args)) if args[k].ndim < 3] if first else []
            for k in sums:
                piece[k] = empty(args[k], tuple(args[k].shape), type_name(args[k]))
            run(*piece)
            for k in sums:
                args[k][...] += piece[k]

    return call


def empty(like: Any, shape: tuple[int, ...], element: str) -> Any:
    """An uninitialised tensor of the kind and on the device of `like`."""
    if is_numpy(like):
        return np.empty(shape, numpy_dtype(dtype(element)))
    torch = sys.modules["torch"]
    return torch.empty_strided(shape, compact(tuple(shape)), dtype=getattr(torch, element), device=like.device)


def zeros(like: Any, shape: tuple[int, ...], element: str) -> Any:
    """A tensor of zeros of the kind and on the device of `like`."""
    if is_numpy(like):
        return np.zeros(shape, numpy_dtype(dtype(element)))
    torch = sys.modules["torch"]
    return torch.zeros(shape, dtype=getattr(torch, element), device=like.device)


def filled(like: Any, shape: tuple[int, ...], value: Any, element: str) -> Any:
    """A tensor of one value of the kind and on the device of `like`."""
    out = empty(like, shape, element)
    if is_numpy(out):
        out.fill(value)
    else:
        out.fill_(value)
    return out


def sum_into(out: Any, x: Any, axis: int | tuple[int, ...]) -> None:
    """out = x summed over axes, in x's type.  torch: an assignment to out[...] takes the host as long as two launches."""
    if is_numpy(out):
        out[...] = x.sum(axis)
    elif out.dtype == x.dtype:
        sys.modules["torch"].sum(x, axis, out=out)
    else:
        out.copy_(x.sum(axis))


def zeros_laid(like: Any, shape: tuple[int, ...], steps: tuple[int, ...], element: str) -> Any:
    """A tensor of zeros with these strides, in elements."""
    flat = zeros(like, (1 + sum((n - 1) * s for n, s in zip(shape, steps)),), element)
    if is_numpy(flat):
        return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * flat.itemsize for s in steps))
    return flat.as_strided(shape, steps)


def fresh(x: Any) -> Any:
    """A contiguous copy at an aligned address."""
    return x.copy() if is_numpy(x) else x.clone()


def padded(x: Any, *more: int) -> Any:
    """A copy with this many zeros behind the last axes, the last one first."""
    if is_numpy(x):
        return np.pad(x, [(0, 0)] * (x.ndim - len(more)) + [(0, n) for n in reversed(more)])
    return sys.modules["torch"].nn.functional.pad(x, [m for n in more for m in (0, n)])


def compact_copy(x: Any) -> Any:
    """A contiguous copy, which kernels can read."""
    return np.ascontiguousarray(x) if is_numpy(x) else x.clone(memory_format=sys.modules["torch"].contiguous_format)


def contiguous(x: Any) -> Any:
    """x, or a copy that a kernel can read."""
    if isinstance(x, np.ndarray):
        return x if strides(x) == compact(x.shape) and aligned(x) else compact_copy(x)
    return x if x.stride() == compact(x.shape) and not x.data_ptr() & 15 else compact_copy(x)


def copied_to(like: Any, x: np.ndarray) -> Any:
    """A copy of a NumPy array as a torch tensor on the device of `like`."""
    return sys.modules["torch"].from_numpy(x).to(like.device, non_blocking=True)


def capturing(like: Any) -> bool:
    """Whether launches for such tensors are captured in a CUDA graph, which fills new tensors when it runs."""
    return not is_numpy(like) and like.is_cuda and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def settled(x: Any) -> Any:
    """A tensor that later calls read, which may come on other streams: what makes it has ended."""
    if not is_numpy(x) and x.is_cuda and not capturing(x):
        sys.modules["torch"].cuda.current_stream(x.device).synchronize()
    return x


def left_of(x: Any, columns: int) -> Any:
    """A view of the first columns. torch's narrow takes a third of the time of indexing."""
    return x[..., :columns] if is_numpy(x) else x.narrow(-1, 0, columns)
