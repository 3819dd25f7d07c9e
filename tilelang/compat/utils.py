"""Helpers that tests and scripts use."""

from __future__ import annotations

from typing import Any

from tilelang.jit.supply import TensorSupplyType
from tilelang.version import build_date

from .deprecation import deprecated
from .buffers import (
    array_reduce,
    get_buffer_region_from_load,
    is_full_region,
    retrieve_shape,
    retrieve_stride,
    retrive_ptr_from_buffer_region,
    side_effect,
    to_buffer_region,
)
from .scopes import is_fragment, is_global, is_local, is_shared, is_shared_dynamic, is_tensor_memory
from .tensor import torch_assert_close


def get_prim_func_name(func: Any, default: str = "main") -> str:
    """Name of a program."""
    return getattr(getattr(func, "func", func), "name", None) or default


__all__ = ["TensorSupplyType", "array_reduce", "build_date", "deprecated", "get_buffer_region_from_load",
           "get_prim_func_name", "is_fragment", "is_full_region", "is_global", "is_local", "is_shared", "is_shared_dynamic",
           "is_tensor_memory", "retrieve_shape", "retrieve_stride", "retrive_ptr_from_buffer_region", "side_effect",
           "to_buffer_region", "torch_assert_close"]
