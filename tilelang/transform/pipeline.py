"""The pass lists of the compiler in the order in which they run; `lower` runs them for a GPU, `lower_cpu` for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as with_fields
from importlib import import_module
from typing import Any

from tilelang.errors import TileLangError, error
from tilelang.ir import For, Func, Launch, replace, rewrite_launches, rewrite_stmts, walk, with_options, GLOBAL, SHARED
from tilelang.ops import Copy
from tilelang.target import Target

from .analysis.pipeline_loops import SERIAL, is_pipelined, ring_stages, wanted_stages
from .framework.config import PassConfigKey
from .framework.pass_ import DEVICE, PassContext, PassFn, pass_, run_passes
from .framework.scope import plan_only
from .legalize.aliasing import overlapping
from .legalize.hopper_features import hopper, may_resize
from .legalize.staged_reads import may_have_scales
from .lower.device_program import LoweredProgram, split_host
from .verify_sync.plan import follows

log = logging.getLogger("tilelang.transform")


def _passes(*places: str) -> tuple[PassFn, ...]:
    """The passes of a list: `room.module`, whose pass has the name of its module, or `room.module:pass`."""
    found = []
    for place in places:
        module, _, name = place.partition(":")
        found.append(getattr(import_module(f".{module}", __package__), name or module.rpartition(".")[2]))
    return tuple(found)


# A comment on an entry gives the reason for its place in the order.
TILE_PASSES = _passes(
    "legalize.legalize",
    "legalize.native_forms",  # after legalize, which says what is wrong with a program; before passes that look at loops
    "legalize.private_fragments",  # before all checks of which elements iterations and threads access
    "legalize.bind_calls",  # after legalize, which rejects names without values; before all passes that write guards
    "legalize.fold_thread_count",  # before all passes that ask which threads reach a statement
    "legalize.block_returns",  # after fold_thread_count, which removes dead branches; before passes that look for warp roles
    "legalize.branches_to_warp_roles",  # before all passes that look for warp roles
    # After fold_thread_count and branches_to_warp_roles, which leave the branches of single threads; before check_hopper, which
    # makes plain branches of warp roles.
    "legalize.single_updates:warp_role_updates",
    "check.check_bounds",
    "check.check_operands",
    "check.check_private",
    "check.check_lanes",
    "legalize.order_warp_roles",  # after check_lanes, which checks the user's own barriers; before check_hopper, see above
    "check.check_hopper",
    "check.check_races",
    "check.check_ranks",
    "check.check_overlaps",
    "legalize.resolve_parallel_reads",  # before unpack_small_types, which adds loads of its own
    "check.check_pipelines",  # before unpack_small_types: it counts the user's statements
    "check.check_blocks",  # after the checks of single statements, which say more of what is wrong there
    "legalize.laid_out_arrays",  # after all checks of which elements accesses touch; like the next, it makes loops of tile ops
    "legalize.unpack_small_types",  # after legalize, which counts negative indices from the end of unpacked rows
    # After check_hopper, which keeps the warp roles, and check_private: private variables outlive the split branches.
    "legalize.split_warp_role_branches",
)
DEVICE_PASSES = _passes(
    "legalize.aliasing:keep_order",  # before all passes that move a read in front of a write
    "legalize.blocks_of_tiles",  # before block_shape, which resizes blocks of a grid
    "legalize.cut_tiles",  # before all passes that choose instructions for GEMMs
    "legalize.block_shape",  # before all passes that choose instructions, layouts and warp roles
    "legalize.joined_steps",  # after block_shape, which decides what wgmma computes; before all passes that give tiles versions
    "check.check_collective",  # before warp specialisation and layouts: it checks the branches that the user wrote
    "legalize.single_updates",  # after check_collective; before all passes that place barriers or layouts
    "legalize.ballot_masks",  # after check_collective: code that it rejects needs no masks
    "lower.shorten_exponents",  # before shorten_rounded: it looks for tanh in its own form
    "lower.shorten_rounded",  # before all passes that reorder the statements of a loop or split tiles
    "legalize.recomputed_rows",  # after shorten_rounded, which follows values to their uses
    "layout.exchanged_tiles",  # before passes that give tiles versions or choose TMA; after those that look for fragments
    "layout.staged_transposes",  # like exchanged_tiles
    "schedule.resident_blocks",  # before all passes over loops
    "legalize.kept_iterations",  # before all passes that look at the statements of pipelined loops
    "legalize.staged_reads:staged_writes",  # after block_shape; before all passes that choose TMA for copies
    "legalize.given_boxes",  # before lower_manual_warp_roles, the first pass that chooses TMA or wgmma
    "legalize.manual_warp_roles:lower_manual_warp_roles",
    "legalize.transposed_operands",  # after lower_manual_warp_roles, whose launches it skips; before all passes that schedule
    "legalize.held_operands:reused_tiles",  # like held_operands; before it, which reads tiles in front of loops
    "legalize.held_operands",  # after lower_manual_warp_roles, whose launches it skips; before all passes that schedule
    "legalize.held_operands:kept_operands",  # like held_operands
    "legalize.staged_reads",  # after given_boxes, which marks columns for TMA; before passes that give tiles versions
    "memory.disjoint_tiles",  # after lower_manual_warp_roles, whose launches it skips; before passes that give tiles versions
    "legalize.guard_masks",  # before specialize_warps, which reorders the statements of a loop
    "layout.split_accumulators",  # after guard_masks, which makes GEMMs that clear; before the next, which schedules them
    "schedule.specialize_warps",  # before plan_pipelines, which schedules the loops that are not warp-specialised
    "schedule.plan_pipelines",  # before layouts: it gives shared buffers their versions
    "schedule.late_waits",  # after all passes that schedule GEMMs
    "lower.tma_copies",  # for copies that no pass before took; before layouts: it decides which tiles are split into TMA boxes
    "legalize.native_forms:untaken_im2col",  # after the last pass that chooses TMA
    "layout.infer_layouts",
    "lower.defer_reductions",  # after layouts: it must know which lanes hold copies
    "lower.lower_tile_ops",  # TILE -> THREADS_BOUND
    "memory.reuse_shared_memory",  # after lowering, which allocates buffers; before place_sync: shared bytes need barriers
    "sync.place_sync",  # THREADS_BOUND -> SYNCED; after lowering: it needs every access of every thread
    "registers.fetch_ahead",  # after place_sync, whose barriers it moves
    "memory.plan_shared_memory",  # SYNCED -> DEVICE; its reuse of memory needs the barriers
    "memory.simplify:lane_quotients",  # before simplify, which cleans up its results
    "memory.simplify",
    "registers.join_loads",  # after simplify, in whose terms it compares addresses; before pack_conversions, which takes bytes
    "registers.fused_multiplies",  # before passes that find pairs of operations; after simplify, which folds constants
    "registers.small_tanh",  # after simplify, which makes constants of its factors; before passes over the final loops
    "registers.accumulator_registers:assign_accumulator_registers",  # after simplify: it follows the final program's values
    "registers.operand_pieces",  # after assign_accumulator_registers, which pins arrays as a whole
    "sync.insert_pdl",  # after place_sync and simplify: accesses of global memory are no longer moved
    "registers.code_tables",  # before pack_conversions, which changes the arithmetic that it evaluates
    "registers.pack_conversions",  # after assign_accumulator_registers: loops on named registers do their own conversions
    "check.verify_sync",  # last: it checks the program that is printed, with the planned offsets
)


def legalized(func: Func, target: Any = None, config: Mapping[str, Any] | None = None) -> Func:
    """The program after the checks and rewrites that all targets share, still in phase TILE."""
    return run_passes(func, TILE_PASSES, PassContext(target, config or {}))


def lower_cpu(func: Func, target: Any = None, config: Mapping[str, Any] | None = None) -> Func:
    """The program in phase CPU, which codegen/cpu prints for this processor.

    Raises TileLangError for programs that cannot be compiled: cpu-unsupported at the user's line for what only the CPU target
    does not compile.
    """
    from .cpu import CPU_PASSES  # 10 ms, which no other target needs

    return run_passes(func, (*TILE_PASSES, *CPU_PASSES), PassContext(target or Target("cpu"), config or {}))


# Fallback schedules, each simpler than the one before: (what the program is compiled without, the options that do it).
_NO_SCALE_PREFETCH = {PassConfigKey.TL_SCALE_PREFETCH.value: False}
_NO_WARP_ROLES = {PassConfigKey.TL_DISABLE_WARP_SPECIALIZED.value: True}
_NO_HOPPER = {**_NO_WARP_ROLES, PassConfigKey.TL_ENABLE_HOPPER.value: False}
_PLAINER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}), ("scale prefetch", _NO_SCALE_PREFETCH), ("warp specialisation", _NO_WARP_ROLES),
    ("Hopper features", _NO_HOPPER), ("asynchronous copies", {**_NO_HOPPER, PassConfigKey.TL_ENABLE_ASYNC_COPY.value: False}),
)
_ONCE = "bytes of shared memory that two tiles use", {PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE.value: True}
_AS_WRITTEN = "blocks and steps of another size"
_SMALLER = "scale prefetch", _AS_WRITTEN, "some pipeline stages", "warp specialisation", "asynchronous copies"  # takes less


def lower(func: Func, target: Any = None, config: Mapping[str, Any] | None = None,
          cx: PassContext | None = None, early: Callable[[LoweredProgram], None] | None = None) -> LoweredProgram:
    """Lower `func` to a device program for a GPU target.

    config: pass configs, by key or PassConfigKey.
    early: called with each program before its synchronisation is verified, so that the caller can start work on it. The
        program of the last call is the one returned, except for the attrs `sync_report` and `report`. When `lower` raises,
        the caller throws that work away.

    When the synchronisation of a program cannot be verified, the program is compiled again with simpler schedules: without
    scale prefetch, warp specialisation, Hopper features, asynchronous copies, in this order. The attr `report` of
    its launches then names what was given up. The first two are also given up where the program otherwise
    does not fit in shared memory, and between them blocks and steps of another size than the program's (block_shape.py,
    joined_steps.py), then stages of its pipelined loops (_fewer_stages). Inside an
    `as_planned` block only the first schedule is tried.

    Raises TileLangError for programs that cannot be compiled, and InternalError (naming a report folder) when a pass fails.
    """
    cx = cx or PassContext(target, config or {})
    if overlapping(func, bool(cx.option(PassConfigKey.TIR_NOALIAS))):
        cx = with_fields(cx, config={**cx.config, **_PLAINER[-1][1]})
    passes = (*TILE_PASSES, *DEVICE_PASSES)
    if early is not None:
        passes = (*passes[:-1], _announce(early), passes[-1])
    first: TileLangError | None = None
    limit = getattr(cx.target, "max_shared_bytes", None)
    why = ""
    tries = [(*x, func) for x in _schedules(func, cx)]
    while tries:
        given_up, changes, program = tries.pop(0)
        if first is not None and first.kind == "shared-memory" and given_up not in _SMALLER:
            break
        try:
            out = run_passes(program, passes, with_fields(cx, config={**cx.config, **changes}))
        except TileLangError as e:
            if e.kind == "shared-memory" and limit and (not tries or tries[0][0] != "scale prefetch"):
                fewer = None if given_up == _AS_WRITTEN else _fewer_stages(program, int(e.found or 0) - limit)
                tries[:0] = [] if fewer is None else [("some pipeline stages", changes, fewer)]
                if program is func and given_up != _AS_WRITTEN and may_resize(cx):
                    tries.insert(0, (_AS_WRITTEN, {**changes, PassConfigKey.TL_RESIZE_BLOCKS.value: False}, program))
            if e.kind == "sync-unordered" and not given_up:
                tries.insert(0, (*_ONCE, program))
            if e.kind not in ("sync-unordered", "shared-memory") and (first is None or first.kind == "shared-memory"):
                raise first or e from None
            if first is None or first.kind == e.kind == "shared-memory":  # the last of these tells what is too much at least
                first = e
            why = why or e.message
            if plan_only():
                break
            continue
        doubt = _doubt(out)
        if doubt is None or _asynchronous(func):  # the user ordered the accesses by hand: a simpler schedule would not help
            if why:
                if given_up != _AS_WRITTEN:
                    log.warning("`%s` is compiled without %s: %s", func.name, given_up, why)
                out = _with_report(out, f"compiled without {given_up}: {why}")
            return split_host(out)
        why = why or doubt
        if plan_only():
            break
        if not given_up:
            tries.insert(0, (*_ONCE, program))
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
    """The entries of _PLAINER that lead to different schedules for this program, target and options."""
    seen: list[Any] = []
    for given_up, changes in _PLAINER:
        it = with_fields(cx, config={**cx.config, **changes})
        what = (hopper(it), may_have_scales(func, it), it.option(PassConfigKey.TL_ENABLE_ASYNC_COPY))
        if what not in seen:
            seen.append(what)
            yield given_up, changes


def _doubt(func: Func) -> str | None:
    """Why the verifier cannot prove the synchronisation of a program with mbarriers, TMA or wgmma; None where it can."""
    for x in walk(func.body):
        if isinstance(x, Launch):
            verdict = x.plan.sync_report or ""
            if verdict.startswith(("not checked", "not cleared")) and _asynchronous(x):
                return verdict
    return None


def _asynchronous(n: Func | Launch) -> bool:
    """Whether threads are ordered by more than block barriers and cp.async groups, so that the verifier needs its model."""
    return follows(list(walk(n.body)))


def _with_report(func: Func, line: str) -> Func:
    """The program with a line added to the reports of its launches."""
    return rewrite_launches(func, lambda n: with_options(n, report=(*n.plan.report, line)))


def _fewer_stages(func: Func, excess: int) -> Func | None:
    """The program with as many stages less as free `excess` bytes; None where each loop has one stage.

    The loop with the largest tiles loses a stage first; no loop goes below two stages, which still overlap, before all have
    two.  A loop whose statements have an order and stages of their own becomes sequential.
    """
    loops = {id(s): s for s in walk(func.body, For) if is_pipelined(s)}
    asked = {k: ring_stages(s) or max(wanted_stages(s)[1]) + 1 for k, s in loops.items()}  # type: ignore[index]
    stages = dict(asked)
    tiles = {k: sum(b.bits // 8 for b in {c.dst.buffer for c in walk(s.body, Copy) if c.src.buffer.scope_name == GLOBAL}
                    if b.scope_name in SHARED and b.is_static) for k, s in loops.items()}
    while excess > 0 and any(n > 1 for n in stages.values()):
        some = [k for k, n in stages.items() if n > 2] or [k for k, n in stages.items() if n > 1]
        k = max(some, key=lambda k: tiles[k])
        by = stages[k] - 1 if ring_stages(loops[k]) is None else 1
        stages[k], excess = stages[k] - by, excess - by * tiles[k]

    def fewer(s: object) -> For | None:
        if not isinstance(s, For) or stages.get(id(s)) == asked.get(id(s)):
            return None
        plain = {} if ring_stages(s) is not None else SERIAL
        return with_options(replace(s, body=rewrite_stmts(s.body, fewer)), **{**plain, "num_stages": stages[id(s)]})

    return None if stages == asked else rewrite_stmts(func, fewer)
