"""The one list of passes, read top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilelang.errors import TileLangError
from tilelang.ir import Func

from .check_collective import check_collective
from .check_pipelines import check_pipelines
from .config import PassConfigKey
from .device_program import DeviceKernel, LoweredProgram, split_host
from .flatten import flatten
from .guard_masks import guard_masks
from .infer_layouts import infer_layouts
from .legalize import legalize
from .lower_tile_ops import lower_tile_ops
from .pass_ import PassContext, PassFn, run_passes
from .place_sync import place_sync
from .plan_pipelines import plan_pipelines
from .plan_shared_memory import plan_shared_memory
from .simplify import simplify
from .specialize_warps import specialize_warps
from .tma_copies import tma_copies
from .unpack_small_types import unpack_small_types
from .verify_sync import verify_sync

log = logging.getLogger("tilelang.transform")

# Order matters where a line says so.
TILE_PASSES: tuple[PassFn, ...] = (
    legalize,
    check_pipelines,  # before unpack_small_types: it counts the statements of the user
    unpack_small_types,  # after legalize, which counts negative indices from the end of unpacked rows
)
DEVICE_PASSES: tuple[PassFn, ...] = (
    check_collective,  # before roles and layouts: it sees the user's branches
    guard_masks,  # before specialize_warps, which reorders the statements of a loop
    specialize_warps,  # before plan_pipelines, which keeps what it leaves
    plan_pipelines,  # before layouts: it gives shared buffers their versions
    tma_copies,  # of what the two before left; before layouts: it says which tiles lie in panels
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
    InternalError (naming a report folder) for faults of a pass.  A program whose synchronisation cannot be cleared is
    compiled again without asynchronous copies, and refused if that fails too.
    """
    cx = cx or PassContext(target, config or {})
    passes = (*TILE_PASSES, *DEVICE_PASSES)
    try:
        return split_host(run_passes(func, passes, cx))
    except TileLangError as e:
        if e.kind != "sync-unordered" or not cx.option(PassConfigKey.TL_ENABLE_ASYNC_COPY):
            raise
        plain = replace(cx, config={**cx.config, PassConfigKey.TL_ENABLE_ASYNC_COPY: False})
        try:
            out = split_host(run_passes(func, passes, plain))
        except TileLangError:
            raise e from None
        log.warning("`%s` is compiled without asynchronous copies: %s", func.name, e.message)
        return out


__all__ = ["DEVICE_PASSES", "TILE_PASSES", "DeviceKernel", "LoweredProgram", "legalized", "lower"]
