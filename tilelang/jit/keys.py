"""Keys under which compiled kernels are remembered per function: equal keys mean equal programs."""

from __future__ import annotations

import sys
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from tilelang.ir import Node, dtype

SIMPLE = (int, str, bool, type(None), dtype)  # types whose == and hash tell programs apart, given the type

_PLAIN = (*SIMPLE, float)


def freeze(value: Any) -> Any:
    """A hashable stand-in for a compile-time value.

    dtypes count as their name, so that "float32", T.float32 and torch.float32 agree.  Numbers keep their type (1,
    True and 1.0 differ).  Lists, dicts and sets are frozen; callables and other objects count by identity or their
    own hash, objects compared by identity also by their plain attributes.  Raises TypeError for other unhashable values.
    """
    t = type(value)
    if isinstance(value, str):
        return str(value)
    if t is bool or t is int or value is None:
        return t.__name__, value
    if t is float:
        return "float", value.hex()
    if t is list or t is tuple:
        return t.__name__, tuple(map(freeze, value))
    if t is dict:
        return "dict", tuple((freeze(k), freeze(v)) for k, v in value.items())
    if t in (set, frozenset):
        return "set", frozenset(map(freeze, value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "dtype", ())):
        try:
            return str(dtype(value))
        except (TypeError, ValueError):
            return value
    if isinstance(value, Node):
        return Same(value)
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"Unsupported unhashable JIT compile-time cache key value {value!r} of type "
                        f"{type(value).__name__}") from None
    owner = value.__self__ if t is MethodType else value
    if is_settings(owner):
        return Same(value) if owner is value else value, attributes(owner)
    return value


def is_settings(x: Any) -> bool:
    """An object of the user that is told apart by identity and may change: no function, class, module, container or
    object of ours."""
    t = type(x)
    return (t.__hash__ in (object.__hash__, None) and isinstance(getattr(x, "__dict__", None), dict) and
            not isinstance(x, (type, FunctionType, MethodType, ModuleType, partial, dict, list, set)) and
            (t.__module__ or "").partition(".")[0] not in ("tilelang", "torch", "numpy"))


def attributes(value: Any, depth: int = 3) -> tuple[Any, ...]:
    """Attributes of an object that are numbers, strings, dtypes, or containers and objects of them (to a depth): what a
    program made from the object may have read, and its owner may have changed since."""
    out = []
    for name, x in vars(value).items():
        t = type(x)
        if t in _PLAIN:
            out.append((name, freeze(x)))
        elif t in (list, tuple, dict, set):
            if all(type(y) in _PLAIN for y in (x if t is not dict else [*x, *x.values()])):
                out.append((name, freeze(x)))
        elif depth and is_settings(x):
            out.append((name, attributes(x, depth - 1)))
    return tuple(out)


class Same:
    """Compares an object by identity and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def freeze_tensor(value: Any) -> Any:
    """dtype, shape and strides of a tensor; the frozen value for anything else."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return freeze(value)
    return "tensor", str(value.dtype), tuple(map(str, shape)), strides_of(value)


def strides_of(x: Any) -> tuple[Any, ...] | None:
    """Strides of a tensor in elements; None where it does not tell (compact)."""
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
