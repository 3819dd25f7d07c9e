"""Keys of a function's compiled kernels, made from compile-time values: equal keys mean equal programs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Node, dtype

register("jit-key", TypeError, "a compile-time value of @tilelang.jit that cannot be distinguished from others",
         "pass numbers, strings, functions, or containers of them", "a hashable value, a list, a dict or a set")

SIMPLE = (int, str, bool, type(None), dtype)  # types whose == and hash tell programs apart, given the type

_PLAIN = (*SIMPLE, float)
_FUNCTIONS = (FunctionType, MethodType, ModuleType, type)
_CONTAINERS = (list, tuple, dict, set, frozenset)

# Packages whose modules, classes and functions are not part of a key: their state does not change a program.
FOREIGN = frozenset({"tilelang", "tvm", "torch", "numpy", "ml_dtypes", *sys.stdlib_module_names} - {"__main__"})


def freeze(value: Any) -> Any:
    """A hashable stand-in for a compile-time value.

    dtypes are compared by name, so that "float32", T.float32 and torch.float32 agree.  Numbers keep their type (1,
    True and 1.0 differ).  Lists, dicts and sets are frozen by content.  Callables and other objects are compared by identity
    or by their hash; objects compared by identity also by their plain attributes.  Raises TypeError for other unhashable
    values.
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
            return f"{dtype(value)}"
        except (TypeError, ValueError):
            return value
    if isinstance(value, Node):
        return Same(value)
    try:
        hash(value)
    except TypeError:
        raise error("jit-key", f"Unsupported unhashable JIT compile-time cache key value {value!r} of type {t.__name__}",
                    found=f"a value of type {t.__name__}") from None
    owner = value.__self__ if t is MethodType else value
    if is_settings(owner):
        return Same(value) if owner is value else value, attributes(owner)
    return value


def is_settings(x: Any) -> bool:
    """Whether x is a mutable object of the user that is compared by identity: no function, class, module, container or object
    of this package."""
    t = type(x)
    return (t.__hash__ in (object.__hash__, None) and isinstance(getattr(x, "__dict__", None), dict) and
            not isinstance(x, (type, FunctionType, MethodType, ModuleType, partial, dict, list, set)) and
            (t.__module__ or "").partition(".")[0] not in ("builtins", "tilelang", "torch", "numpy"))


def attributes(value: Any, depth: int = 3) -> tuple[Any, ...]:
    """A hashable form of the attributes of a user's object or class, including those of its classes: numbers, strings, dtypes,
    and containers and objects of these (to a limited depth).

    A program made from the object may have read these attributes, and they may have changed since."""
    out = []
    for name, x in _fields(value):
        t = type(x)
        if t in _PLAIN:
            out.append((name, freeze(x)))
        elif t in _CONTAINERS:
            with suppress(_NotPlain):
                out.append((name, content(x, _not_plain)))
        elif depth and is_settings(x):
            out.append((name, attributes(x, depth - 1)))
    return tuple(out)


def content(value: Any, other: Callable[[Any], Any], depth: int = 20) -> Any:
    """A hashable stand-in for the contents of lists, tuples, dicts, sets and arrays, at every depth.

    other(x): the stand-in for a value that is no container, number, string or dtype."""
    t = type(value)
    if t in _PLAIN:
        return freeze(value)
    if not depth or t in _FUNCTIONS:
        return other(value)
    if isinstance(value, (list, tuple, deque)):
        return t, tuple([content(x, other, depth - 1) for x in value])
    if isinstance(value, Mapping):
        return t, tuple([(content(k, other, depth - 1), content(x, other, depth - 1)) for k, x in list(value.items())])
    if isinstance(value, (set, frozenset)):
        return t, frozenset([content(x, other, depth - 1) for x in value])
    if isinstance(value, bytearray):
        return t, bytes(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.hasobject:
            return content(value.tolist(), other, depth - 1)
        return t, str(value.dtype), value.shape, value.tobytes()
    if torch is not None and isinstance(value, getattr(torch, "dtype", ())):
        return freeze(value)
    return other(value)


def is_plain(value: Any) -> bool:
    """Whether containers hold only numbers, strings and dtypes."""
    try:
        content(value, _not_plain)
    except _NotPlain:
        return False
    return True


class _NotPlain(Exception):
    """A container holds a value that is not plain."""


def _not_plain(value: Any) -> Any:
    raise _NotPlain


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes stored in an object, then those of its classes that the user defined (for a class: its own and its bases').
    Python's special names are left out."""
    seen = set[str]()
    own = value if isinstance(value, type) else type(value)
    slots = [n for c in own.__mro__ for n in (c.__dict__.get("__slots__") or ())] if own is not value else []
    places = [{n: getattr(value, n) for n in slots if n.isidentifier() and hasattr(value, n)}]
    if own is not value:
        places.append(getattr(value, "__dict__", None) or {})
    places += [dict(vars(c)) for c in own.__mro__ if (c.__module__ or "").partition(".")[0] not in FOREIGN]
    for names in places:
        for name, x in list(names.items()):
            if name not in seen and not (name.startswith("__") and name.endswith("__")):
                seen.add(name)
                yield name, x


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
