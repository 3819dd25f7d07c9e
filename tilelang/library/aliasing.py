"""Whether a result and the tensors that are read while it is written are disjoint in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import numpy as np

from .arrays import is_numpy, place, strided, strides


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
