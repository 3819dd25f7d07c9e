"""How far two correct results of one call may differ when they were computed in different orders.

Each result lies within the error bound of its function's docstring, so two of them differ by at most twice that bound.

Whether a result and the tensors that are read while it is written are disjoint in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import methodcaller
from typing import Any

import numpy as np

from .arrays import is_numpy, place, strided, strides, type_name


class _Bytes:
    """Bytes in memory, presented as a NumPy array that is never read."""

    def __init__(self, x: Any, size: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": tuple(x.shape), "strides": tuple(n * size for n in x.stride()),
                                    "data": (x.data_ptr(), False), "typestr": f"|V{size}"}


def overlap(x: Any, y: Any) -> bool:
    """Whether two tensors have memory in common. True also where the exact test would take too long."""
    if place(x) != place(y) or 0 in x.shape or 0 in y.shape:
        return False
    a, b = (t if is_numpy(t) else np.asarray(_Bytes(t, t.element_size())) for t in (x, y))
    try:
        return bool(np.may_share_memory(a, b) and np.shares_memory(a, b, max_work=10_000))
    except RuntimeError:  # the exact test would take too long
        return True


def _numpy_address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


_torch_address: Callable[[Any], int] = methodcaller("data_ptr")


def _span(x: Any) -> int | None:
    """(address of the first byte, address behind the last byte) of a tensor; None where elements lie before the first one."""
    if 0 in x.shape:
        return 0
    if not strided(x):
        return None
    return (1 + sum((int(n) - 1) * s for n, s in zip(x.shape, strides(x)))) * int(x.itemsize)


class Disjoint:
    """Tests by addresses alone whether `out` and other tensors of one device are disjoint. Calling `overlap` for each takes 6
    us.

    An object is made for tensors of given shapes, strides and element types, and holds for all tensors with these. others: None
    for arguments that are left out.
    """

    __slots__ = ("address", "size", "spans")

    def __init__(self, out: Any, others: Sequence[Any]) -> None:
        self.address = _numpy_address if is_numpy(out) else _torch_address
        self.size = _span(out)
        self.spans = tuple((k, _span(x)) for k, x in enumerate(others) if x is not None)

    def surely(self, out: Any, others: Sequence[Any]) -> bool:
        """Whether the tensors are certainly disjoint. False is also returned for disjoint tensors whose elements interleave."""
        address, size = self.address, self.size
        if size is None:
            return False
        low = address(out)
        high = low + size
        for k, n in self.spans:
            if n is None:
                return False
            at = address(others[k])
            if at < high and low < at + n:
                return False
        return True


U = 2.0**-24
# Element type -> (relative and absolute rounding error, largest finite number).
ROUNDING = {"float16": (2.0**-11, 2.0**-25, 65504.0), "bfloat16": (2.0**-8, 2.0**-134, 3.3895314e38),
            "float32": (U, 2.0**-150, 3.4028235e38), "float64": (2.0**-53, 0.0, 1.7976931348623157e308),
            "float8_e4m3fn": (2.0**-4, 2.0**-10, 448.0), "float8_e5m2": (2.0**-3, 2.0**-17, 57344.0)}
_SLOPE = 1.13  # largest slope of relu, both forms of gelu, and silu
_FEW = 16 * U  # relative error that an epilogue adds to its terms
_PIECE = 1 << 23  # elements that are compared at a time


def wide(x: Any) -> Any:
    """The tensor converted to float64."""
    if is_numpy(x):
        return x.astype(np.float64)
    return (x.float() if x.itemsize == 1 else x).double()


def _chunks(x: Any, axis: int) -> Iterator[slice]:
    """Slices that divide a dimension into chunks of about _PIECE elements of the tensor."""
    n = x.shape[axis]
    step = max(1, _PIECE * n // max(1, int(np.prod([int(d) for d in x.shape]))))
    for at in range(0, n, step):
        yield slice(at, at + step)


def magnitude(x: Any) -> Any:
    """The magnitudes of a tensor's elements, in its type; None for None."""
    if x is None or type_name(x) == "int8":
        return x if x is None else abs(x.clip(-127, 127))
    if is_numpy(x) or not type_name(x).startswith("float8"):
        return abs(x)
    return (x.view(sys.modules["torch"].uint8) & 127).view(x.dtype)


@np.errstate(all="ignore")
def within(x: Any, y: Any, bound: Callable[[slice], Any]) -> bool:
    """Whether two tensors differ by no more than `bound` plus the rounding of both to their type.

    bound: a function from a slice of the next to last dimension to the largest difference. Where it is not finite, any values
    are accepted. Where it is finite, both values are NaN or neither is, and values too large for the type count as its largest
    number. Integers must be equal.
    """
    if type_name(x) not in ROUNDING:
        return bool((x == y).all())
    relative, absolute, most = ROUNDING[type_name(x)]
    for chunk in _chunks(x, -2):
        v, w = wide(x[..., chunk, :]), wide(y[..., chunk, :])
        limit = bound(chunk)
        none = (v != v) & (w != w) | (limit != limit) | (abs(limit) == float("inf"))
        v, w = v.clip(-most, most), w.clip(-most, most)
        near = abs(v - w) <= limit + relative * abs(v) + relative * abs(w) + 2 * absolute
        if not bool((near | none).all()):
            return False
    return True


def gemms_agree(k: int, kind: str, two_level: bool, magnitudes: Callable[[], Any]) -> Callable[[Any, Any], bool]:
    """A function f(x, y) that tells whether two results of a GEMM (library/gemm/matmul.py) may both be correct.

    k: terms of a sum. kind: MatmulProblem.kind. two_level: whether sums are promoted. magnitudes: computes the GEMM of the
    magnitudes of its operands, scales and bias. An activation leaves at least half of such a sum.
    """
    u = 2.0**-53 if kind == "float" else U
    low = {"tf32": 2.0**-10, "fp8": 2.0**-11 if two_level else max(2.0**-11, k / 32 * 2.0**-13)}.get(kind, 0.0)
    error = 4 * _SLOPE * ((0.0 if kind == "int8" else k * u + low) + _FEW)
    sums = cache(magnitudes)
    return lambda x, y: within(x, y, lambda chunk: error * wide(sums()[..., chunk, :]))


def attention_agrees(q: Any, k: Any, v: Any, scale: float, seq_k: int) -> Callable[[tuple[Any, ...], tuple[Any, ...]], bool]:
    """A function f(x, y) that tells whether two results of attention, (output, logarithms or None), may both be correct."""
    half, tf32 = type_name(q) == "float16", type_name(q) == "float32"  # only GPUs are tuned, which multiply float32 in tf32
    eps = 2.0**-9 if tf32 else ROUNDING[type_name(q)][0]

    def largest(x: Any) -> float:
        """The largest finite magnitude. Elements that no query reads may hold anything."""
        x = abs(x)[abs(x) < float("inf")]
        return float(x.max()) if x.shape[0] else 0.0

    def longest(x: Any) -> float:
        rows = x.reshape(-1, x.shape[-1])
        return max(largest((wide(rows[chunk])**2).sum(-1)**0.5) for chunk in _chunks(rows, 0))

    @cache
    def limits() -> tuple[float, float]:
        """(largest difference of results, largest difference of logarithms)."""
        scores = 2 * (q.shape[-1] * U + (2.0**-9 if tf32 else 0.0)) * scale * longest(q) * longest(k)
        weights = 2 * eps + scores + 2.0**-18 + (2.0**-25 * seq_k if half else 0.0)
        flat = v.reshape(-1, v.shape[-1])
        values = max(largest(wide(flat[chunk])) for chunk in _chunks(flat, 0))
        return 2 * values * weights, 2 * (weights + 8 * U)

    @np.errstate(all="ignore")
    def agree(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
        limit, of_logs = limits()
        good = within(x[0], y[0], lambda chunk: limit)
        if not good or x[1] is None:
            return good
        logs = [t.reshape(-1, t.shape[-1]) for t in (x[1], y[1])]
        same = logs[0] == logs[1]
        near = abs(wide(logs[0]) - wide(logs[1])) <= of_logs + 4 * U * abs(wide(logs[0]))
        return bool((same | near).all())

    return agree
