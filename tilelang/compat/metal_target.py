"""Questions about Apple targets; no target of this version is one."""

from __future__ import annotations

from typing import Any

from tilelang.target import Target


def target_is_metal(target: Any) -> bool:
    """A Metal target: never, in this version.  Raises AssertionError for an unknown target."""
    Target(target)
    return False


def check_metal_availability() -> bool:
    """Whether an Apple GPU can be used: no."""
    return False


__all__ = ["check_metal_availability", "target_is_metal"]
