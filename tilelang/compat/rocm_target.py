"""Questions about AMD targets; no target of this version is one."""

from __future__ import annotations

from typing import Any

from tilelang.target import Target


def _known(target: Any) -> bool:
    """False.  Raises an error for a target that does not exist."""
    Target(target)
    return False


def target_is_hip(target: Any) -> bool:
    """An AMD target: never, in this version.  Raises AssertionError for an unknown target."""
    return _known(target)


target_is_rocm = target_is_hip


def target_is_cdna(target: Any) -> bool:
    """A CDNA target: never.  Raises AssertionError for an unknown target."""
    return _known(target)


def target_is_rdna(target: Any) -> bool:
    """An RDNA target: never.  Raises AssertionError for an unknown target."""
    return _known(target)


def target_is_gfx950(target: Any) -> bool:
    """A gfx950 target: never.  Raises AssertionError for an unknown target."""
    return _known(target)


def check_hip_availability() -> bool:
    """Whether an AMD GPU can be used: no."""
    return False


check_rocm_availability = check_hip_availability

__all__ = ["check_hip_availability", "check_rocm_availability", "target_is_cdna", "target_is_gfx950", "target_is_hip",
           "target_is_rdna", "target_is_rocm"]
