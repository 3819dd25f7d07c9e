"""tilelang.lower: source and parameters of a program, for any target, without running it."""

from __future__ import annotations

import sys
import types
from typing import Any

from tilelang.jit.artifact import CompiledArtifact
from tilelang.jit.lowering import lower, parameters

extrac_params = parameters


class _CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> CompiledArtifact:
        return lower(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

__all__ = ["CompiledArtifact", "extrac_params", "lower"]
