"""The one list of passes, read top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tilelang.errors import TileLangError, error
from tilelang.ir import Func, Launch, rewrite, walk, with_options
from tilelang.ir import replace as replaced

from .legalize.aliasing import keep_order, overlapping
from .legalize.ballot_masks import ballot_masks
from .legalize.bind_calls import bind_calls
from .legalize.block_returns import block_returns
from .check.check_collective import check_collective
from .check.check_divisors import check_divisors
from .check.check_hopper import check_hopper
from .check.check_iterations import check_iterations
from .check.check_pipelines import check_pipelines
from .check.check_private import check_private
from .check.check_races import check_races
from .check.check_warp_roles import check_warp_roles
from .framework.config import PassConfigKey
from .lower.defer_reductions import defer_reductions
from .schedule.insert_pdl import insert_pdl
from .registers.overlap_epilogue import overlap_epilogue
from .lower.device_program import DeviceKernel, LoweredProgram, split_host
from .memory.flatten import flatten
from .legalize.branches_to_warp_roles import branches_to_warp_roles
from .legalize.guard_masks import guard_masks
from .legalize.hopper_features import hopper
from .layout.infer_layouts import infer_layouts
from .memory.lane_quotients import lane_quotients
from .legalize.legalize import legalize
from .lower.lower_tile_ops import lower_tile_ops
from .legalize.split_warp_role_branches import split_warp_role_branches
from .framework.pass_ import DEVICE, PassContext, PassFn, pass_, run_passes
from .sync.place_sync import place_sync
from .schedule.plan_pipelines import plan_pipelines
from .memory.plan_shared_memory import plan_shared_memory
from .registers.accumulator_registers import assign_accumulator_registers
from .registers.dequantise_pairs import dequantise_pairs
from .registers.order_register_reductions import order_register_reductions
from .registers.pack_conversions import pack_conversions
from .registers.pipeline_descriptors import pipeline_descriptors
from .registers.shorten_live_ranges import shorten_live_ranges
from .check.reject_races import reject_races
from .framework.scope import plan_only
from .legalize.resolve_parallel_reads import resolve_parallel_reads
from .legalize.fold_thread_count import fold_thread_count
from .memory.simplify import simplify
from .schedule.specialize_warps import specialize_warps
from .schedule.split_accumulators import split_accumulators
from .schedule.pingpong_barriers import may_ping_pong
from .schedule.prefetch_scales import may_prefetch_scales
from .legalize.tma_columns import tma_columns
from .lower.tma_copies import tma_copies
from .legalize.unpack_small_types import unpack_small_types
from .check.verify_sync import verify_sync
from .verify_sync.plan import follows
from .legalize.manual_warp_roles import lower_manual_warp_roles

log = logging.getLogger("tilelang.transform")

# Order matters where a line says so.
TILE_PASSES: tuple[PassFn, ...] = (
    legalize,
    bind_calls,  # after legalize, which refuses names without values; before all that writes guards
    fold_thread_count,  # before all that asks who gets where
    block_returns,  # after it: it knows which branches there are; before all that asks who gets where or looks for roles
    branches_to_warp_roles,  # before all that looks for roles
    check_divisors,
    check_iterations,
    check_private,
    check_warp_roles,  # before check_hopper, which turns T.ws into tests of thread numbers where it can
    check_hopper,
    check_races,  # only where asked for
    reject_races,  # after it: what is refused has been told of
    resolve_parallel_reads,  # before unpack_small_types, which makes loads of its own
    check_pipelines,  # before unpack_small_types: it counts the statements of the user
    unpack_small_types,  # after legalize, which counts negative indices from the end of unpacked rows
    # After check_hopper, which keeps the warp roles, and check_private: private variables outlive the pieces.
    split_warp_role_branches,
)
DEVICE_PASSES: tuple[PassFn, ...] = (
    keep_order,  # before all that moves a read in front of a write
    check_collective,  # before roles and layouts: it sees the user's branches
    ballot_masks,  # after it: what it refuses needs no masks
    tma_columns,  # before lower_manual_warp_roles, the first that asks for TMA
    lower_manual_warp_roles,
    guard_masks,  # before specialize_warps, which reorders the statements of a loop
    split_accumulators,  # after guard_masks, which makes products that clear; before specialize_warps, which schedules them
    specialize_warps,  # before plan_pipelines, which keeps what it leaves
    plan_pipelines,  # before layouts: it gives shared buffers their versions
    tma_copies,  # of what the two before left; before layouts: it says which tiles lie in panels
    infer_layouts,
    defer_reductions,  # after layouts: it must know which lanes hold copies
    lower_tile_ops,  # TILE -> THREADS_BOUND
    place_sync,  # THREADS_BOUND -> SYNCED; after lowering: it needs every access of every thread
    flatten,
    plan_shared_memory,  # SYNCED -> DEVICE; its reuse needs the barriers
    lane_quotients,  # before simplify, which tidies up after it
    simplify,
    overlap_epilogue,  # after simplify and before assign_accumulator_registers: it asks which registers statements name
    assign_accumulator_registers,  # after simplify: it follows values through the final program
    insert_pdl,  # after place_sync and simplify: every access of global memory has its place
    dequantise_pairs,  # before pack_conversions, which would convert the weights one by one
    pack_conversions,  # after assign_accumulator_registers: loops on named registers convert by themselves
    pipeline_descriptors,
    order_register_reductions,  # after assign_accumulator_registers, whose loops on named registers it marks
    shorten_live_ranges,  # after pipeline_descriptors: loops that it changed have their own copies of thread indices
    verify_sync,  # last: it checks what is printed, with the planned offsets
)


def legalized(func: Func, target: Any = None, config: Mapping[str, Any] | None = None) -> Func:
    """The program after the checks and rewrites that every target shares; still in phase TILE."""
    return run_passes(func, TILE_PASSES, PassContext(target, config or {}))


# Schedules, each plainer than the one before: what is given up, and the options that do it.
_NO_STEP_TILES = {PassConfigKey.TL_SCALE_PREFETCH.value: False}
_NO_TURNS = {PassConfigKey.TL_PING_PONG.value: False}
_NO_ROLES = {PassConfigKey.TL_DISABLE_WARP_SPECIALIZED.value: True}
_NO_HOPPER = {**_NO_ROLES, PassConfigKey.TL_ENABLE_HOPPER.value: False}
_PLAINER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}), ("tiles of several steps", _NO_STEP_TILES), ("turns of warp groups", _NO_TURNS), ("warp roles", _NO_ROLES),
    ("the Hopper path", _NO_HOPPER), ("asynchronous copies", {**_NO_HOPPER, PassConfigKey.TL_ENABLE_ASYNC_COPY.value: False}),
)


def lower(func: Func, target: Any = None, config: Mapping[str, Any] | None = None,
          cx: PassContext | None = None, early: Callable[[LoweredProgram], None] | None = None) -> LoweredProgram:
    """The device program of `func` for a GPU target.

    config: pass configs, by key or PassConfigKey.  Raises TileLangError for programs that cannot be compiled,
    InternalError (naming a report folder) for faults of a pass.  A program whose synchronisation cannot be cleared is
    compiled again by plainer schedules: without tiles of several steps, turns of warp groups, warp roles, the Hopper path,
    asynchronous copies.
    Its launches then say so in their attr `report`.  What fails with all of them is refused, in `as_planned` what fails
    with the first.

    early: called with each program before its synchronisation is verified; the last call's is the one returned but for
    the attrs `sync_report` and `report`.  Whoever starts work on it then throws that away when this function raises.
    Tiles of several steps (prefetch_scales.py) are also given up where they take the last shared memory.
    """
    cx = cx or PassContext(target, config or {})
    if overlapping(func, bool(cx.option(PassConfigKey.TIR_NOALIAS))):
        cx = replace(cx, config={**cx.config, **_PLAINER[-1][1]})
    passes = (*TILE_PASSES, *DEVICE_PASSES)
    if early is not None:
        passes = (*passes[:-1], _announce(early), passes[-1])
    first: TileLangError | None = None
    why = ""
    for given_up, changes in _schedules(func, cx):
        try:
            out = run_passes(func, passes, replace(cx, config={**cx.config, **changes}))
        except TileLangError as e:
            tight = e.kind == "shared-memory" and not given_up and may_prefetch_scales(func, cx)
            if e.kind != "sync-unordered" and not tight and (first is None or first.kind == "shared-memory"):
                raise
            first, why = first or e, why or e.message
            if plan_only():
                break
            continue
        doubt = _doubt(out)
        if doubt is None or _asynchronous(func):  # ordered by hand: no schedule of ours is in question
            if why:
                log.warning("`%s` is compiled without %s: %s", func.name, given_up, why)
                out = _told(out, f"compiled without {given_up}: {why}")
            return split_host(out)
        why = why or doubt
        if plan_only():
            break
    if first is not None:
        raise first from None
    raise error("sync-unordered", f"the synchronisation of `{func.name}` cannot be cleared: {why}",
                found="synchronisation that cannot be cleared", span=func.span)


def _announce(early: Callable[[LoweredProgram], None]) -> PassFn:
    """A pass that changes nothing and calls `early`."""
    @pass_(needs=DEVICE)
    def print_kernels(func: Func, cx: PassContext) -> Func:
        early(split_host(func))
        return func

    return print_kernels


def _schedules(func: Func, cx: PassContext) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of _PLAINER that differ for this program, target and options."""
    seen: list[Any] = []
    for given_up, changes in _PLAINER:
        it = replace(cx, config={**cx.config, **changes})
        what = (hopper(it), may_prefetch_scales(func, it), may_ping_pong(func, it),
                it.option(PassConfigKey.TL_ENABLE_ASYNC_COPY))
        if what not in seen:
            seen.append(what)
            yield given_up, changes


def _doubt(func: Func) -> str | None:
    """Why the verifier does not vouch for a program with mbarriers, TMA or wgmma, None when it does."""
    for x in walk(func.body):
        if isinstance(x, Launch):
            verdict = x.plan.sync_report or ""
            if verdict.startswith(("not checked", "not cleared")) and _asynchronous(x):
                return verdict
    return None


def _asynchronous(n: Func | Launch) -> bool:
    """Whether the verifier needs its model: threads are ordered by more than block barriers and cp.async groups."""
    return follows(list(walk(n.body)))


def _told(func: Func, line: str) -> Func:
    """The program with a line added to the reports of its launches."""
    return replaced(func, body=rewrite(func.body, lambda x: with_options(
        x, report=(*x.plan.report, line)) if isinstance(x, Launch) else None))


__all__ = ["DEVICE_PASSES", "TILE_PASSES", "DeviceKernel", "LoweredProgram", "legalized", "lower"]
