"""The one list of passes, read top to bottom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelang.ir import Func

from .pass_ import PassContext, PassFn, run_passes

# Order matters where a line says so.
TILE_PASSES: tuple[PassFn, ...] = ()
DEVICE_PASSES: tuple[PassFn, ...] = ()


def legalized(func: Func, target: Any = None, config: Mapping[str, Any] | None = None) -> Func:
    """The program after the checks and rewrites that every target shares; still in phase TILE."""
    return run_passes(func, TILE_PASSES, PassContext(target, config or {}))


__all__ = ["DEVICE_PASSES", "TILE_PASSES", "legalized"]
