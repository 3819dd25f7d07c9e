"""`import tvm` where no such package is installed: the names of `tilelang.tvm`, for programs that import it by itself.

The finder stands last on sys.meta_path: an installed package of that name is found before, and nothing is imported until
somebody asks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "tvm"


def _named(fullname: str) -> Any:
    """What a dotted name stands for in tilelang.compat.tvm; None when there is nothing."""
    value: Any = import_module("tilelang.compat.tvm")
    for part in fullname.split(".")[1:]:
        value = getattr(value, part, None)
    return value


class _Loader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The names are looked up when they are used."""


class _Names(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = None if name.startswith("__") and name != "__version__" else getattr(_named(self.__name__), name, None)
        if value is None:
            raise AttributeError(f"the tvm names of tilelang have no {self.__name__}.{name}")
        return value


class _Finder:
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        if fullname != NAME and (_named(fullname) is None or isinstance(_named(fullname), type)):
            return None
        return ModuleSpec(fullname, _Loader(), is_package=True)  # type: ignore[arg-type]


def install() -> None:
    """Let `import tvm` find these names, once a process."""
    if not any(type(f).__name__ == "_Finder" and type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]


__all__ = ["NAME", "install"]
