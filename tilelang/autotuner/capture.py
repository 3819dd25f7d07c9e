"""Inputs that the caller gives for measuring candidates."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

_local = threading.local()


def _stack() -> list[list[Any]]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def _frozen(x: Any) -> Any:
    """A private copy of an input, which no candidate can change."""
    if hasattr(x, "clone"):
        return x.detach().clone()
    return x.copy() if hasattr(x, "copy") and hasattr(x, "shape") else x


class set_autotune_inputs:
    """`with set_autotune_inputs(a, b):` tuned calls inside are measured on copies of these inputs.  It also takes one list."""

    def __init__(self, *args: Any) -> None:
        given: Sequence[Any] = args
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            given = args[0]
        self.inputs = [_frozen(x) for x in given]

    def __enter__(self) -> set_autotune_inputs:
        _stack().append(self.inputs)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()


def get_autotune_inputs() -> list[Any] | None:
    """The inputs of this thread's innermost set_autotune_inputs block, or None."""
    return _stack()[-1] if _stack() else None
