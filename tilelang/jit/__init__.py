"""@tilelang.jit, tilelang.compile and the kernels they return.

The package is callable: `@tilelang.jit` is the decorator whether or not this package was imported before.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from .compiling import compile, par_compile
from .decorator import JITImpl, jit
from .kernel import JITKernel


class _CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return jit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

__all__ = ["JITImpl", "JITKernel", "compile", "jit", "par_compile"]
