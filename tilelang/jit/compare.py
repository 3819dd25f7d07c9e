"""Comparison of tensors with tolerances and an allowed fraction of mismatches."""

from __future__ import annotations

from typing import Any


def is_float8_dtype(dt: Any) -> bool:
    """Whether a torch dtype is one of the 8-bit floats."""
    return "float8" in str(dt)


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
    close = torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)
    bad, total = int((~close).sum()), close.numel()
    if verbose:
        print(f"{bad} of {total} elements differ between {base_name} and {ref_name}")
    if bad > total * max_mismatched_ratio:
        at = tuple(int(i) for i in torch.nonzero(~close)[0])
        raise AssertionError(
            f"Too many mismatched elements: {bad} of {total} ({bad / total:.2%}), allowed "
            f"{max_mismatched_ratio:.2%} with rtol={rtol}, atol={atol}; the first at {at}: {base_name} {x[at].item()}, "
            f"{ref_name} {y[at].item()}; largest difference {float((x - y).abs().nan_to_num(0).max()):.6g}")
    return True
