"""The one list of passes, read top to bottom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelang.ir import Func

from .device_program import DeviceKernel, LoweredProgram, split_host
from .flatten import flatten
from .infer_layouts import infer_layouts
from .legalize import legalize
from .lower_tile_ops import lower_tile_ops
from .pass_ import PassContext, PassFn, run_passes
from .place_sync import place_sync
from .plan_pipelines import plan_pipelines
from .plan_shared_memory import plan_shared_memory
from .simplify import simplify
from .verify_sync import verify_sync

# Order matters where a line says so.
TILE_PASSES: tuple[PassFn, ...] = (legalize,)
DEVICE_PASSES: tuple[PassFn, ...] = (
    plan_pipelines,  # before layouts: it gives shared buffers their versions
    infer_layouts,
    lower_tile_ops,  # TILE -> THREADS_BOUND
    place_sync,  # THREADS_BOUND -> SYNCED; after lowering: it needs every access of every thread
    flatten,
    plan_shared_memory,  # SYNCED -> DEVICE; its reuse needs the barriers
    simplify,
    verify_sync,  # last: it checks what is printed, with the planned offsets
)


def legalized(func: Func, target: Any = None, config: Mapping[str, Any] | None = None) -> Func:
    """The program after the checks and rewrites that every target shares; still in phase TILE."""
    return run_passes(func, TILE_PASSES, PassContext(target, config or {}))


def lower(func: Func, target: Any = None, config: Mapping[str, Any] | None = None,
          cx: PassContext | None = None) -> LoweredProgram:
    """The device program of `func` for a GPU target.

    config: pass configs, by key or PassConfigKey.  Raises TileLangError for programs that cannot be compiled,
    InternalError (naming a report folder) for faults of a pass.
    """
    cx = cx or PassContext(target, config or {})
    return split_host(run_passes(func, (*TILE_PASSES, *DEVICE_PASSES), cx))


__all__ = ["DEVICE_PASSES", "TILE_PASSES", "DeviceKernel", "LoweredProgram", "legalized", "lower"]
