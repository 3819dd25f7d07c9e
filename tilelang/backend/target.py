"""tilelang.backend.target: which target a spec means."""

from __future__ import annotations

from tilelang.target import Target, determine_target


def auto_detect_target() -> Target:
    """The target "auto" means now."""
    return Target("auto")


__all__ = ["auto_detect_target", "determine_target"]
