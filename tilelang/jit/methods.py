"""@tilelang.jit on methods: a decorated function called on an object gets the object as its first argument."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

_FIRST = ("self", "cls")


class BoundJIT:
    """A decorated function bound to an object.  owner: the decorated function.  obj: the object, a compile-time value whose
    plain attributes (numbers, strings, dtypes, containers and objects of them) are part of a kernel's key."""

    def __init__(self, owner: Any, obj: Any) -> None:
        self.__func__, self.__self__ = owner, obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def par_compile(self, configs: Iterable[Any], num_workers: int | None = None, ignore_error: bool = False) -> Any:
        me = {self.__func__.first_parameter: self.__self__}
        given = [(self.__self__, *c) if isinstance(c, tuple) else {**me, **c} if isinstance(c, dict) else c for c in configs]
        return self.__func__.par_compile(given, num_workers, ignore_error)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__func__, name)
        return partial(found, self.__self__) if name in ("compile", "get_tir", "get_kernel_source") else found

    def __repr__(self) -> str:
        return f"<{self.__func__!r} of {self.__self__!r}>"


class InClasses:
    """Makes a decorated function a method when its first parameter is `self` (or `cls` below @classmethod).

    Other decorated functions in a class body or in class attributes are not bound to the object.
    """

    first_parameter: str

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None or self.first_parameter not in _FIRST else BoundJIT(self, obj)

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[attr-defined]  # by name, as functions are
