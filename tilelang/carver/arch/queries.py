"""Predicates and look-ups of architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import dtype
from tilelang.target import Target, determine_target
from tilelang.target.mma import mma_rows

from .cuda import CDNA, CUDA
from .device import CPU, TileDevice


def get_arch(target: Any = "cuda") -> TileDevice:
    """The architecture of a target.  Raises AssertionError for a target this version does not compile for."""
    found = target if isinstance(target, Target) else Target(target)
    return CUDA(target) if found.is_cuda else CDNA(found) if found.is_gpu else CPU(found)


def auto_infer_current_arch() -> TileDevice:
    """The architecture of the current target or device.  Raises ValueError when there is neither."""
    return get_arch(determine_target("auto", return_object=True))


def is_cuda_arch(arch: TileDevice) -> bool:
    """Whether an architecture is NVIDIA's."""
    return isinstance(arch, CUDA)


def _between(chip: str, low: int, high: int, about: str) -> Callable[[TileDevice], bool]:
    def asked(arch: TileDevice) -> bool:
        return is_cuda_arch(arch) and low <= arch.sm_version < high

    asked.__name__ = asked.__qualname__ = f"is_{chip}_arch"
    asked.__doc__ = f"Whether an architecture is {about}."
    return asked


is_volta_arch, is_ampere_arch = _between("volta", 70, 75, "sm_70 or sm_72"), _between("ampere", 80, 89, "sm_80 up to sm_88")
is_ada_arch, is_hopper_arch = _between("ada", 89, 90, "sm_89"), _between("hopper", 90, 91, "sm_90")


def is_cdna_arch(arch: TileDevice) -> bool:
    """Whether an architecture is a data-centre GPU of AMD."""
    return isinstance(arch, CDNA)


is_rdna_arch = _between("rdna", 0, 0, "another AMD GPU: never, they are not supported")


def has_mma_support(arch: TileDevice) -> bool:
    """Whether an architecture has mma.sync."""
    return is_cuda_arch(arch) and arch.sm_version >= 80


_HALF = {("float16", "float16"), ("float16", "float32")}
_WHOLE = {("int8", "int32"), ("uint8", "int32")}
_SINCE = ((70, _HALF), (75, _WHOLE), (80, {("bfloat16", "float32"), ("int4", "int32")}),
          (89, {(f, a) for f in ("float8_e4m3fn", "float8_e5m2") for a in ("float32", "float16")}))


def is_tensorcore_supported_precision(in_dtype: Any, accum_dtype: Any, arch: TileDevice) -> bool:
    """Whether tensor cores multiply these element types without rounding them first (so not float32)."""
    pair = f"{dtype(in_dtype)}", f"{dtype(accum_dtype)}"
    if isinstance(arch, CDNA):
        return any(row.a_dtype == dtype(in_dtype) for row in mma_rows(arch.target, in_dtype, in_dtype, accum_dtype))
    pair = pair[0].replace("float8_e4m3", "float8_e4m3fn").replace("fnfn", "fn"), pair[1]
    return is_cuda_arch(arch) and any(arch.sm_version >= since and pair in pairs for since, pairs in _SINCE)


def check_sm_version(arch: str) -> int:
    """"sm_80" -> 80; -1 for other text."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits) if arch.startswith("sm_") and digits.isdigit() else -1
