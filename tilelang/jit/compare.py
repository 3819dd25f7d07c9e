"""Comparison of tensors with tolerances and an allowed fraction of mismatches."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def is_float8_dtype(dt: Any) -> bool:
    """Whether a torch dtype is one of the 8-bit floats."""
    return "float8" in str(dt)


def assert_close(a: Any, b: Any, rtol: float, atol: float, max_mismatched_ratio: float) -> None:
    """torch_assert_close for a kernel's result and a reference program's, in any packages; float8 is compared as float32.

    Element types are compared where both are tensors of torch.  Raises AssertionError."""
    torch = sys.modules.get("torch")
    tensors = () if torch is None else tuple(x for x in (a, b) if isinstance(x, torch.Tensor))
    if len(tensors) == 2:
        a, b = (x.float() if is_float8_dtype(x.dtype) else x for x in tensors)
        torch_assert_close(a, b, rtol, atol, max_mismatched_ratio, base_name="tilelang", ref_name="reference")
        return
    x, y = (np.asarray(v.detach().cpu().double() if any(v is t for t in tensors) else v).astype(np.float64) for v in (a, b))
    if x.shape != y.shape:
        raise AssertionError(f"shape differs: tilelang has {x.shape}, reference has {y.shape}")
    wrong = ~np.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    if wrong.sum() > wrong.size * max_mismatched_ratio:
        raise _mismatch(wrong, x, y, f"{max_mismatched_ratio:.2%} with rtol={rtol}, atol={atol}", "tilelang", "reference")


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

    Raises AssertionError otherwise, and when shapes, dtypes, devices, layouts or strides (as asked) differ.
    """
    import torch

    a, b = tensor_a, tensor_b
    rows = ((True, "shape", tuple(a.shape), tuple(b.shape)), (check_dtype, "dtype", a.dtype, b.dtype),
            (check_device, "device", a.device, b.device), (check_layout, "layout", a.layout, b.layout),
            (check_stride, "stride", a.stride(), b.stride()))
    for wanted, name, x, y in rows:
        if wanted and x != y:
            raise AssertionError(f"{name} differs: {base_name} has {x}, {ref_name} has {y}")
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    x, y = a.to(wide), b.to(wide)
    wrong = ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)
    bad, total = int(wrong.sum()), wrong.numel()
    if verbose:
        print(f"{bad} of {total} elements differ between {base_name} and {ref_name}")
    if bad > total * max_mismatched_ratio:
        raise _mismatch(wrong.cpu().numpy(), x.cpu().numpy(), y.cpu().numpy(), f"{max_mismatched_ratio:.2%} with rtol={rtol}, "
                        f"atol={atol}", base_name, ref_name)
    return True


def _mismatch(wrong: np.ndarray, x: np.ndarray, y: np.ndarray, allowed: str, base_name: str, ref_name: str) -> AssertionError:
    bad, at = int(wrong.sum()), tuple(int(i) for i in np.argwhere(wrong)[0])
    return AssertionError(
        f"Too many mismatched elements: {bad} of {wrong.size} ({bad / wrong.size:.2%}), allowed {allowed}; the first at {at}: "
        f"{base_name} {x[at]}, {ref_name} {y[at]}; largest difference {float(np.nan_to_num(np.abs(x - y), nan=0).max()):.6g}")
