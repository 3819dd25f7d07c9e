"""Elements of Python containers and objects in kernel code that read memory: they are read when the object is assigned."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from tilelang.ir import Expr

from .regions import BufferSlice

_OTHERS = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_LIBRARIES = frozenset(("tilelang", "torch", "numpy", "builtins", "functools"))


_DEPTH = 4  # of nested objects.  Objects that kernel code makes are shallow; others that it names may hold a whole model


def settle(value: Any, now: Callable[[Any], Any], depth: int = 0) -> Any:
    """Apply `now` to each element of lists and dicts and each attribute of the user's objects in an assigned value.

    Containers and objects are changed in place; tuples are rebuilt.  Objects of libraries and objects without a __dict__
    stay unchanged.
    """
    if isinstance(value, (Expr, BufferSlice)):
        return now(value)
    if depth == _DEPTH:
        return value
    if type(value) is tuple or isinstance(value, tuple) and hasattr(value, "_make"):
        kept = [settle(x, now, depth + 1) for x in value]
        if all(x is y for x, y in zip(kept, value)):
            return value
        return tuple(kept) if type(value) is tuple else value._make(kept)  # type: ignore[attr-defined]
    if not _is_open(value):
        return value
    inside = value if isinstance(value, (list, dict)) else vars(value)
    for key, x in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
        kept = settle(x, now, depth + 1)
        if kept is not x:
            inside[key] = kept
    return value


def _is_open(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return True
    return (not isinstance(value, _OTHERS) and hasattr(value, "__dict__")
            and type(value).__module__.partition(".")[0] not in _LIBRARIES)
