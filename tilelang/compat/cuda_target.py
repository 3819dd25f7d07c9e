"""Queries of the features of CUDA and HIP targets.

Questions about RDNA chips and Apple targets; no target of this version is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.language.tracing.state import error
from tilelang.target import Target
from tilelang.target.probe import device_capability
from tilelang.target.target import hip_arch


def _never(what: str) -> Callable[[Any], bool]:
    def asked(target: Any) -> bool:
        Target(target)
        return False

    asked.__doc__ = f"{what} target: never, in this version.  Raises AssertionError for an unknown target."
    return asked


AVAILABLE_TARGETS = {"auto": "the GPU of this machine, else its CPU", "cuda": "the GPU of this machine, or an arch: "
                     '{"kind": "cuda", "arch": "sm_90a"}', "hip": "an AMD GPU: "
                     '{"kind": "hip", "mcpu": "gfx942"}', "cpu": "this machine's CPU", "llvm": "as cpu", "c": "as cpu"}
AVALIABLE_TARGETS = AVAILABLE_TARGETS  # sic: the name that programs import
target_is_rdna, target_is_metal = map(_never, ("An RDNA", "A Metal"))


def target_is_hip(target: Any) -> bool:
    """A target of AMD GPUs.  All that this version compiles for are CDNA chips."""
    return Target(target).is_hip


def target_is_gfx950(target: Any) -> bool:
    """A target of the chip gfx950."""
    return Target(target).arch == "gfx950"


target_is_rocm = target_is_cdna = target_is_hip


def check_hip_availability() -> bool:
    """Whether this machine has an AMD GPU that this version compiles for."""
    return hip_arch() is not None


def check_metal_availability() -> bool:
    """Whether a GPU of Apple can be used: no."""
    return False


check_rocm_availability = check_hip_availability


def _number(target: Any) -> int:
    return Target(target).arch_number


def target_is_cuda(target: Any) -> bool:
    """A CUDA target."""
    return _number(target) > 0


def _between(low: int, high: int, what: str) -> Callable[[Any], bool]:
    def asked(target: Any) -> bool:
        return low <= _number(target) < high

    asked.__doc__ = what
    return asked


target_is_volta, target_is_turing = _between(70, 75, "sm_70 up to sm_74."), _between(75, 80, "sm_75 up to sm_79.")
target_is_ampere = _between(80, 90, "sm_80 up to sm_89: the instructions of Ada are those of Ampere and fp8.")
target_is_hopper, target_is_sm120 = _between(90, 100, "sm_90."), _between(120, 130, "sm_120 and sm_121.")
target_has_async_copy, target_has_ldmatrix = _between(80, 999, "cp.async."), _between(75, 999, "ldmatrix.")
target_has_stmatrix, target_has_bulk_copy = _between(90, 999, "stmatrix."), _between(90, 999, "Bulk copies and TMA.")


def check_cuda_availability() -> bool:
    """Whether a CUDA device is at hand."""
    return device_capability() is not None


def normalize_cutedsl_target(target: Any) -> Any:
    """None for targets of other kinds.  Raises NotImplementedError for cutedsl, which is not available."""
    kind = target.get("kind") if isinstance(target, dict) else str(target)
    if str(kind).split(" ")[0] == "cutedsl":
        raise error("not-available", "the cutedsl target is not available",
                    found="the target cutedsl", hint='compile for target="cuda"')
    return None


__all__ = ["check_cuda_availability", "normalize_cutedsl_target", "target_has_async_copy", "target_has_bulk_copy",
           "target_has_ldmatrix", "target_has_stmatrix", "target_is_ampere", "target_is_cuda", "target_is_hopper",
           "target_is_sm120", "target_is_turing", "target_is_volta"]
