"""Tensors for tests: making inputs, comparing results."""

from __future__ import annotations

from typing import Any

from tilelang.jit.compare import fp8_remove_negative_zeros_, is_float8_dtype, torch_assert_close
from tilelang.jit.supply import TensorSupplyType, get_tensor_supply
from tilelang.ir import dtype

__all__ = ["TensorSupplyType", "fp8_remove_negative_zeros_", "get_tensor_supply", "is_float8_dtype", "map_torch_type",
           "torch_assert_close"]


def map_torch_type(name: Any) -> Any:
    """torch dtype of a dtype name."""
    return dtype(name).as_torch()
