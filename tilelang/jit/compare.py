"""Comparison of tensors with tolerances and an allowed fraction of mismatches."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def is_float8_dtype(dt: Any) -> bool:
    """Whether a torch dtype is one of the 8-bit floats."""
    return "float8" in str(dt)


def _as_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach().cpu().double() if hasattr(x, "detach") else x)  # NumPy has not all types of torch


def assert_results_close(got: list[Any], wanted: list[Any], rtol: float, atol: float, max_mismatched_ratio: float) -> None:
    """Compare the results of a kernel with those of a reference; None on a side is no result to compare."""
    assert len(got) == len(wanted), f"the kernel gives {len(got)} outputs, the reference {len(wanted)}"
    for a, b in zip(got, wanted):
        if a is not None and b is not None:
            torch_assert_close(a, b, rtol, atol, max_mismatched_ratio, base_name="tilelang", ref_name="reference",
                               check_dtype=not any(is_float8_dtype(x.dtype) for x in (a, b)))


def fp8_remove_negative_zeros_(tensor: Any) -> Any:
    """Make -0.0 of an fp8 tensor +0.0, in place."""
    import torch

    raw = tensor.view(torch.uint8)
    raw[raw == 0x80] = 0
    return tensor


def torch_assert_close(tensor_a: Any, tensor_b: Any, rtol: float = 1e-2, atol: float = 1e-3,
                       max_mismatched_ratio: float = 0.001, verbose: bool = False, equal_nan: bool = True,
                       check_device: bool = True, check_dtype: bool = True, check_layout: bool = True,
                       check_stride: bool = False, base_name: str = "LHS", ref_name: str = "RHS") -> bool:
    """True when |a - b| <= atol + rtol * |b| for all elements except at most a fraction max_mismatched_ratio.

    Raises AssertionError otherwise, and when shapes, dtypes, devices, layouts or strides (as asked) differ; of arrays that are
    not both torch's, only shapes and values are compared.
    """
    a, b, torch = tensor_a, tensor_b, sys.modules.get("torch")
    tensors = torch is not None and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    rows: list[tuple[bool, str, Any, Any]] = [(True, "shape", tuple(np.shape(a)), tuple(np.shape(b)))]
    if tensors:
        rows += [(check_dtype, "dtype", a.dtype, b.dtype), (check_device, "device", a.device, b.device),
                 (check_layout, "layout", a.layout, b.layout), (check_stride, "stride", a.stride(), b.stride())]
    for wanted, name, of_a, of_b in rows:
        if wanted and of_a != of_b:
            raise AssertionError(f"{name} differs: {base_name} has {of_a}, {ref_name} has {of_b}")
    package: Any = torch if tensors else np
    wide: Any = package.complex128 if "complex" in str(a.dtype) else package.float64
    x: Any = a.to(wide) if tensors else _as_numpy(a).astype(wide)
    y: Any = b.to(wide) if tensors else _as_numpy(b).astype(wide)
    wrong = ~package.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)
    bad, total = int(wrong.sum()), len(wrong.reshape(-1))
    if verbose:
        print(f"{bad} of {total} elements differ between {base_name} and {ref_name}")
    if bad > total * max_mismatched_ratio:
        wrong, x, y = (np.asarray(v.cpu() if tensors else v) for v in (wrong, x, y))
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"Too many mismatched elements: {bad} of {total} ({bad / total:.2%}), allowed "
            f"{max_mismatched_ratio:.2%} with rtol={rtol}, atol={atol}; the first at {at}: {base_name} {x[at]}, "
            f"{ref_name} {y[at]}; largest difference {float(np.nan_to_num(np.abs(x - y), nan=0).max()):.6g}")
    return True
