"""Questions about AMD and Apple targets; no target of this version is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.target import Target


def _never(what: str) -> Callable[[Any], bool]:
    def asked(target: Any) -> bool:
        Target(target)
        return False

    asked.__doc__ = f"{what} target: never, in this version.  Raises AssertionError for an unknown target."
    return asked


target_is_hip = target_is_rocm = _never("An AMD")
target_is_cdna, target_is_rdna, target_is_gfx950 = map(_never, ("A CDNA", "An RDNA", "A gfx950"))
target_is_metal = _never("A Metal")


def check_hip_availability() -> bool:
    """Whether a GPU of this maker can be used: no."""
    return False


check_rocm_availability = check_metal_availability = check_hip_availability
