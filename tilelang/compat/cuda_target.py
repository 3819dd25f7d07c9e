"""Queries of the features of CUDA targets."""

from __future__ import annotations

from typing import Any

from tilelang.language.tracing.state import error
from tilelang.target import Target
from tilelang.target.probe import device_capability


def _number(target: Any) -> int:
    found = target if isinstance(target, Target) else Target(target)
    return found.arch_number if found.is_cuda else 0


def target_is_cuda(target: Any) -> bool:
    """A CUDA target."""
    return _number(target) > 0


def target_is_volta(target: Any) -> bool:
    """sm_70 up to sm_74."""
    return 70 <= _number(target) < 75


def target_is_turing(target: Any) -> bool:
    """sm_75 up to sm_79."""
    return 75 <= _number(target) < 80


def target_is_ampere(target: Any) -> bool:
    """sm_80 up to sm_89: the instructions of Ada are those of Ampere and fp8."""
    return 80 <= _number(target) < 90


def target_is_hopper(target: Any) -> bool:
    """sm_90."""
    return 90 <= _number(target) < 100


def target_is_sm120(target: Any) -> bool:
    """sm_120 and sm_121."""
    return 120 <= _number(target) < 130


def target_has_async_copy(target: Any) -> bool:
    """cp.async: sm_80 and newer."""
    return _number(target) >= 80


def target_has_ldmatrix(target: Any) -> bool:
    """ldmatrix: sm_75 and newer."""
    return _number(target) >= 75


def target_has_stmatrix(target: Any) -> bool:
    """stmatrix: sm_90 and newer."""
    return _number(target) >= 90


def target_has_bulk_copy(target: Any) -> bool:
    """Bulk copies and TMA: sm_90 and newer."""
    return _number(target) >= 90


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
