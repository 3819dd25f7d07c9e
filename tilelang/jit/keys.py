"""Keys of a function's compiled kernels, made from compile-time values: equal keys mean equal programs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Node, dtype

from .outside import is_foreign_name

register("jit-key", TypeError, "a compile-time value of @tilelang.jit that cannot be distinguished from others",
         "pass numbers, strings, functions, or containers of them", "a hashable value, a list, a dict or a set")

SIMPLE = (int, str, bool, type(None), dtype)  # types whose == and hash distinguish programs, given the type


def freeze(value: Any, other: Callable[..., Any] | None = None, name: str | None = None) -> Any:
    """A hashable stand-in for a compile-time value.

    dtypes are compared by name, so that "float32", T.float32 and torch.float32 agree.  Numbers keep their type (1,
    True and 1.0 differ).  Lists, dicts and sets are frozen by content.  other: gives the stand-in for callables and other
    objects, which are the value of the parameter called name; without it they stand for themselves.  Raises TypeError for
    unhashable values of libraries.
    """
    t = type(value)
    if isinstance(value, str):
        return str(value)
    if t is bool or t is int or value is None:
        return t.__name__, value
    if t is float:
        return "float", value.hex()
    if t is list or t is tuple:
        return t.__name__, tuple([freeze(x, other) for x in value])
    if t is dict:
        return "dict", tuple([(freeze(k, other), freeze(v, other)) for k, v in value.items()])
    if t in (set, frozenset):
        return "set", frozenset([freeze(x, other) for x in value])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "dtype", ())):
        try:
            return f"{dtype(value)}"
        except (TypeError, ValueError):
            return value
    if isinstance(value, Node):
        return Same(value)
    try:
        hash(value)
    except TypeError:
        if other is None or is_foreign_name(t.__module__) and not hasattr(value, "__dict__"):
            raise error("jit-key", f"Unsupported unhashable JIT compile-time cache key value {value!r} of type {t.__name__}",
                        found=f"a value of type {t.__name__}") from None
    return value if other is None else other(value, name)


class Same:
    """Compares an object by identity and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def freeze_tensor(value: Any, other: Callable[..., Any] | None = None, name: str | None = None) -> Any:
    """dtype, shape and strides of a tensor; the frozen value for anything else."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return freeze(value, other, name)
    return "tensor", str(value.dtype), tuple(map(str, shape)), strides_of(value)


def strides_of(x: Any) -> tuple[Any, ...] | None:
    """Strides of a tensor in elements; None where the tensor has no strides (compact)."""
    stride = getattr(x, "stride", None)
    if callable(stride):
        return tuple(stride())
    strides = getattr(x, "strides", None)
    if strides is None:
        return None
    itemsize = getattr(x, "itemsize", None)
    if isinstance(itemsize, int) and itemsize and hasattr(x, "__array_interface__"):
        return tuple(s // itemsize for s in strides)
    return tuple(strides)
