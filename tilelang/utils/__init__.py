"""Helpers that tests and scripts use."""

from __future__ import annotations

from typing import Any

from tilelang.jit.supply import TensorSupplyType
from tilelang.version import build_date

from .deprecation import deprecated
from .scopes import is_fragment, is_global, is_local, is_shared, is_shared_dynamic, is_tensor_memory
from .tensor import torch_assert_close


def get_prim_func_name(func: Any, default: str = "main") -> str:
    """Name of a program."""
    return getattr(getattr(func, "func", func), "name", None) or default


__all__ = ["TensorSupplyType", "build_date", "deprecated", "get_prim_func_name", "is_fragment", "is_global", "is_local",
           "is_shared", "is_shared_dynamic", "is_tensor_memory", "torch_assert_close"]
