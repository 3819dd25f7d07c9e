"""The fp8 types of the present machine: NVIDIA and newer AMD GPUs use the OCP formats, older AMD GPUs the fnuz ones."""

from __future__ import annotations

from typing import Any

from tilelang.ir import dtype

from .tracing.state import error

_TYPES = {"e4m3": ("float8_e4m3fn", "float8_e4m3fnuz"), "e5m2": ("float8_e5m2", "float8_e5m2fnuz")}


def _uses_fnuz() -> bool:
    """Whether torch is installed, is built for ROCm, and its GPU is older than gfx950."""
    try:
        import torch
    except ImportError:
        return False
    if getattr(torch.version, "hip", None) is None:
        return False
    return not (torch.cuda.is_available() and "gfx950" in torch.cuda.get_device_properties(0).gcnArchName)


def determine_fp8_type(fp8_format: str = "e4m3") -> dtype:
    """The dtype of an fp8 format ("e4m3" or "e5m2").  Raises fp8-format."""
    if fp8_format not in _TYPES:
        raise error("fp8-format", f"unsupported fp8 format ‹{fp8_format!r}›, expected 'e4m3' or 'e5m2'")
    return dtype(_TYPES[fp8_format][_uses_fnuz()])


def determine_torch_fp8_type(fp8_format: str = "e4m3") -> Any:
    """The torch dtype of an fp8 format.  Raises RuntimeError when torch lacks it."""
    import torch

    name = str(determine_fp8_type(fp8_format))
    if not hasattr(torch, name):
        raise RuntimeError(f"this torch has no {name}")
    return getattr(torch, name)
