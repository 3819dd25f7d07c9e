"""tilelang.backend.target: which target a spec means, what "auto" asks, and spellings that users add."""

from __future__ import annotations

from tilelang.target import Target, determine_target
from tilelang.target.detect import (
    list_target_detectors,
    list_target_normalizers,
    register_target_detector,
    register_target_normalizer,
    unregister_target_detector,
    unregister_target_normalizer,
)


def auto_detect_target() -> Target:
    """The target "auto" means now: the current scope, else what the first detector finds."""
    return Target("auto")


__all__ = ["auto_detect_target", "determine_target", "list_target_detectors", "list_target_normalizers",
           "register_target_detector", "register_target_normalizer", "unregister_target_detector",
           "unregister_target_normalizer"]
