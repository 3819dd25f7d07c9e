"""Kernels written in the language, with functions that take torch tensors and NumPy arrays.

    from tilelang.library import flash_attention, matmul
    out = flash_attention(q, k, v, causal=True)
    c = matmul(a, b, bias=bias, activation="relu")

Modules are loaded on first use.
"""

from __future__ import annotations

import sys as _sys
import types as _types
from importlib import import_module as _import_module
from typing import Any as _Any

# public function -> module that defines it
_NAMES = {
    "coded_matmul": "coded_matmul",
    "flash_attention": "flash_attention",
    "flash_decode": "flash_decode",
    "grouped_matmul": "matmul",
    "matmul": "matmul",
}


class _Library(_types.ModuleType):
    """The package: a name that a function and its module share means the function, in whatever order they are imported."""

    def __getattr__(self, name: str) -> _Any:
        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(f"{__name__}.{_NAMES[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: _Any) -> None:
        if name in _NAMES and isinstance(value, _types.ModuleType):  # the import system enters a loaded module here
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *_NAMES})


_sys.modules[__name__].__class__ = _Library

__all__ = sorted(_NAMES)
