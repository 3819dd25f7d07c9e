"""Generates inputs for a kernel's parameters: torch tensors where the program uses torch, NumPy arrays otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import dtype, int_range, numpy_dtype
from tilelang.runtime.signature import KernelParam

register("supply-shape", ValueError, "inputs are wanted for a shape that is not static",
         expected="tensor parameters of static shape")


class TensorSupplyType(Enum):
    """The ways to make the values of inputs."""

    Integer = 1
    Uniform = 2
    Normal = 3
    Randn = 4
    Zero = 5
    One = 6
    Auto = 7


def random_values(kind: TensorSupplyType, dt: dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random values of a parameter as float64 or int64; the caller converts them.

    Auto: unsigned in [0,3), bool in {0,1}, fp8 small whole numbers, fp4 codes in [0,16), other floats U(-1,1), other
    integers in [-2,3).  Integer: whole numbers for floats too.  Normal: mean -1, deviation 1.
    """
    if kind is TensorSupplyType.Zero:
        return np.zeros(shape)
    if kind is TensorSupplyType.One:
        return np.ones(shape)
    if dt.is_bool:
        return rng.integers(0, 2, shape)
    if dt.is_float4():
        return rng.integers(0, 16, shape)
    small = kind in (TensorSupplyType.Auto, TensorSupplyType.Integer)
    if dt.is_unsigned and small:
        return rng.integers(0, 3, shape)
    if dt.is_float8 and small:
        return rng.integers(-2, 3, shape)
    if small and (dt.is_int or kind is TensorSupplyType.Integer):
        low = max(-2, int_range(dt)[0]) if dt.is_int else -2
        return rng.integers(low, 3, shape)
    if dt.is_int and dt.bits == 8:
        return np.ones(shape, np.int64)
    if kind is TensorSupplyType.Normal:
        return rng.normal(-1, 1, shape)
    if kind is TensorSupplyType.Randn:
        return rng.standard_normal(shape)
    return rng.uniform(-1, 1, shape)


def static_shape(param: KernelParam) -> tuple[int, ...]:
    """The shape as ints.  Raises ValueError for symbolic dimensions."""
    if not all(isinstance(d, int) for d in param.shape):
        raise error("supply-shape", f"inputs are made for shapes of numbers, found {param.shape}", expected="a static shape",
                    hint="give dynamic_symbolic_constraints={\"m\": …}, or pass input_tensors")
    return tuple(param.shape)


def get_tensor_supply(supply_type: TensorSupplyType = TensorSupplyType.Auto, device: Any = None,
                      seed: int | None = None) -> Callable[[KernelParam], Any]:
    """A function that makes the input of a KernelParam.

    device: a torch device; None means the CPU.  Without torch, NumPy arrays are made.
    """
    rng = np.random.default_rng(seed)

    def supply(param: KernelParam) -> Any:
        dt = dtype(param.dtype)
        if param.is_scalar():
            raise error("supply-shape", f"a value for a scalar parameter of type {dt} cannot be made up",
                        expected="a tensor parameter", found=f"a scalar of type {dt}", hint="pass input_tensors")
        shape = static_shape(param)
        values = random_values(supply_type, dt, shape, rng)
        return to_framework(values, dt, device)

    return supply


def to_framework(values: np.ndarray, dt: dtype, device: Any = None) -> Any:
    """NumPy values as a tensor of an element type: torch's where installed, else NumPy's."""
    if importlib.util.find_spec("torch") is None:
        return values.astype(numpy_dtype(dt))
    import torch

    if dt.bits < 8:  # packed storage, two values a byte
        codes = torch.from_numpy(values.astype(np.int64)) & ((1 << dt.bits) - 1)
        per = 8 // dt.bits
        parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per)
        packed: Any = sum(parts[..., k] << (k * dt.bits) for k in range(per))
        return packed.to(torch.uint8).view(dt.as_torch()).to(device or "cpu")
    want: Any = dt.as_torch()
    source = torch.from_numpy(np.ascontiguousarray(values))
    return source.to(torch.float32).to(want).to(device or "cpu") if dt.is_float else source.to(want).to(device or "cpu")
