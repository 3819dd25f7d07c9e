"""Inputs that the caller gives for measuring candidates."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

_local = threading.local()


def _stack() -> list[list[Any]]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def copied(x: Any) -> Any:
    """A copy of a tensor with the same strides (also those of a strided view); anything else unchanged."""
    if hasattr(x, "clone"):
        x = x.detach()
        if 0 in x.stride() or x.is_contiguous():
            return x.clone()
        return x.new_empty_strided(x.size(), x.stride()).copy_(x)
    return x.copy(order="K") if isinstance(x, np.ndarray) else x.copy() if hasattr(x, "copy") else x


class set_autotune_inputs:
    """`with set_autotune_inputs(a, b):` tuned calls inside are measured on copies of these inputs.  It also takes one list."""

    def __init__(self, *args: Any) -> None:
        given: Sequence[Any] = args
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            given = args[0]
        self.inputs = [copied(x) for x in given]

    def __enter__(self) -> set_autotune_inputs:
        _stack().append(self.inputs)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()


def get_autotune_inputs() -> list[Any] | None:
    """The inputs of this thread's innermost set_autotune_inputs block, or None."""
    return _stack()[-1] if _stack() else None
