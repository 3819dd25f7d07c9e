"""Whole-tensor programs: what is computed, without tiles; lowered to tile programs that a person can read.

The package is callable: `@tilelang.program` is the decorator.  `T.softmax`, `T.einsum` and the other functions of programs are
attributes of it too; they are loaded on first use.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from .api import Program, program
from .tensor import FUNCTIONS, Tensor


class _CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule


def __getattr__(name: str) -> Any:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["FUNCTIONS", "Program", "Tensor", "program"]
