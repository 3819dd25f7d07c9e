"""The reference interpreter: runs a tile program statement by statement, on whole tiles, in NumPy.

Blocks run one after another.  A tile op runs its `reference`.  A Parallel loop runs all its iterations at once (or in
successive groups, see statements.py).  Per-thread code runs on all threads of the block in lock step; where a program never
distinguishes its threads, one lane represents all of them.  Programs with planned pipelines (phase TILE after
plan_pipelines) are also supported: asynchronous copies complete at once, commits and waits do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilelang.ir import (Alloc, Buffer, Call, Evaluate, Func, If, Launch, Load, Parallel, Store, TileOp, Var, children,
                         numpy_dtype, walk)
from tilelang.ops.combine import expanded
from tilelang.ops.im2col import without
from tilelang.target.cluster import cluster_of
from tilelang.target.warp_groups import warps_in

from ..boxes import launch_maps
from .barriers import BARRIER_OPS, ORDER_ONLY
from .block import TileBlock, WarpRole
from .cluster import TileCluster
from .context import Divergence, TileContext, TileLaunch
from .hopper import TILE_HOPPER_OPS, space_of
from .memory_access import allocate, load, store
from .statements import compile_if, evaluate, parallel, synchronised, tile_op
from .warp import WARP_OPS
from ..context import Handlers
from ..control_flow import CONTROL_FLOW
from ..expressions import VALUES
from ..host import Arguments, clusters, run_program
from ..lane_ops import LANE_OPS, VOTES_OF_BLOCKS, Printer
from ..lanes import Action, LaneFrame, contains
from ..rank_ops import RANK_OPS
from ..ranks import Ranks
from .warp_roles import run_warp_roles, warp_roles_of

# ---- a launch --------------------------------------------------------------------------------------------------------

# Executed by each thread.
EACH_LANE = (*LANE_OPS, *VOTES_OF_BLOCKS, *WARP_OPS, "elect_one", "wgmma", "tma_load", "rank_barrier")


class TileProgramLaunch:
    """A launch: blocks one after another, those of a cluster or a grid barrier concurrently.

    warp_roles: of its blocks.  lanes: of a block.  together: whether all blocks run concurrently, for a grid barrier."""

    def __init__(self, c: TileContext, s: Launch) -> None:
        c.launch = TileLaunch(s.num_threads, s.plan.import_source, launch_maps(s), warp_roles=warp_roles_of(s),
                              divergence=Divergence(s), space=space_of(s))
        c.launch.safe = {id(b): c.expr(v) for b, v in s.plan.safe_values}  # these apply inside the kernel only
        c.members = tuple(range(len(c.launch.warp_roles)))
        self.launch, self.dims, self.ranks = s, cluster_of(s), c.ranks
        self.together = c.ranks.size > 1 or contains(s.body, (), ("sync_grid", "wait_signal", "rank_barrier"))
        self.warp = c.warp
        self.warp_roles, self.lanes = c.launch.warp_roles, _lanes(s, c.warp)
        self.whole = WarpRole(0, warps_in(s), s.num_threads)
        self.grid, self.body = [c.expr(g) for g in s.grid], c.stmt(s.body)
        self.block_slots = [(c.slot(v), numpy_dtype(v.dtype).type) for v in s.block_vars]
        self.thread_slots = [c.slot(v) for v in s.thread_vars]

    def run(self, f: LaneFrame) -> None:
        """Run all blocks."""
        extents = [int(g(f)) for g in self.grid]
        groups = (self.frames(g, mates, device) for device, g in enumerate(self.ranks.frames(f))
                  for mates in clusters(extents, self.dims, self.launch.span))
        for frames in filter(None, [[g for mates in groups for g in mates]] if self.together else groups):
            if self.warp_roles or self.dims is not None or len(frames) > 1:
                run_warp_roles(frames, self.warp_roles or [self.whole], self.body, self.ranks.random)
            else:
                self.body(frames[0])

    def frames(self, f: LaneFrame, mates: Any, device: int) -> list[LaneFrame]:
        """The frames of the blocks of a cluster (or of one block) of a rank, given their indices."""
        threads, (x, y, _) = self.launch.num_threads, self.launch.threads
        t, frames = np.arange(self.lanes), []
        for at in mates:
            of = f" of rank {device}" if self.ranks.size > 1 else ""
            block = TileBlock(f.block, f"({', '.join(map(str, at))}){of}", self.warp)
            block.device = device
            g = LaneFrame(list(f.slots), self.lanes, None if self.lanes in (1, threads) else t < threads, block)
            g.warp_role = self.whole
            for (slot, dt), v in zip(self.block_slots, at):
                g.slots[slot] = dt(v)
            for slot, own in zip(self.thread_slots, (t % x, t // x % y, t // (x * y))):
                g.slots[slot] = own.astype(np.int32)
            frames.append(g)
        if self.dims is not None:
            TileCluster([g.block for g in frames], threads * len(frames))
        return frames


def _lanes(s: Launch, warp: int) -> int:
    """Lanes a launch needs: 1 when no thread is distinguished, else its threads rounded up to whole warps."""
    distinguished = set(map(id, s.thread_vars))

    def per_thread(n: Any) -> bool:
        if isinstance(n, Parallel):
            return False  # atomics and prints inside are executed by iteration
        if isinstance(n, Var):
            return id(n) in distinguished
        if isinstance(n, Call) and n.op in EACH_LANE and n.op not in ORDER_ONLY:
            return True
        return not isinstance(n, Buffer) and any(per_thread(c) for c in children(n))

    uses = any(isinstance(n, Var) and id(n) in distinguished for n in walk(s.body)) or per_thread(s.body)
    return -(-s.num_threads // warp) * warp if uses else 1


_STATEMENTS: dict[type, Callable[[Any, Any], Action]] = {
    **CONTROL_FLOW, If: compile_if, Evaluate: evaluate, Store: store, Alloc: allocate, Parallel: parallel, TileOp: tile_op,
    Launch: lambda c, s: TileProgramLaunch(c, s).run}

TILE = Handlers(
    exprs={**VALUES, Load: load},
    stmts={kind: synchronised(handler) for kind, handler in _STATEMENTS.items()},
    calls={**LANE_OPS, **TILE_HOPPER_OPS, **WARP_OPS, **BARRIER_OPS, **RANK_OPS},
)


def run_tile(func: Any, args: Arguments, *, check: bool = True, aliased: bool = False) -> dict[str, np.ndarray]:
    """Run a tile program on NumPy arrays and scalars.

    func: a Func, or the PrimFunc of the language.  args: by name or in parameter order; outputs (`tilelang_out_idx`)
    may be left out.  Returns every tensor parameter after the run, by name; the given arrays are not changed.
    check: reject reads of memory that was never written.  aliased: arrays that share memory do so in the program too.
    Raises sim-argument, sim-out-of-bounds, sim-uninitialized, sim-thread-dependent, sim-unsupported, sim-assert; with
    warp roles or mbarriers also sim-barrier (a deadlock) and sim-mbarrier.
    """
    return _run(func, (args,), None, check, aliased)[0]


def run_tile_ranks(func: Any, args: Sequence[Arguments], *, seed: int | None = None,
                   check: bool = True) -> list[dict[str, np.ndarray]]:
    """Run a tile program on several ranks at once; args: for each rank, as in run_tile.

    seed: None runs the first block that can run, a number chooses blocks at random.  Raises what run_tile raises, and sim-rank.
    """
    return _run(func, args, seed, check, False)


def _run(func: Any, args: Sequence[Arguments], seed: int | None, check: bool, aliased: bool) -> list[dict[str, np.ndarray]]:
    program: Func = without(expanded(getattr(func, "func", func)))
    c = TileContext(program, check, TILE, Ranks(len(args), seed))
    return [b.outputs(check) for b in run_program(c, program, args, aliased, lambda storage: storage, Printer())]
