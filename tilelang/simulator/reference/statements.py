"""Statements whose meaning in the reference interpreter depends on warp roles, and tile ops and Parallel loops.

TMA copies (Copy with tma, barrier) complete at once and signal their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Evaluate, Expr, If, Parallel, Region, Stmt, Store, convert, walk, PRIVATE
from tilelang.ops import Copy
from tilelang.target.warp_groups import holds_in

from .barriers import SYNC_OPS, TileBarrier
from .cluster import to_block
from .context import TileContext
from .env import TileEnv, scalar_elements
from .parallel import ParallelLoop
from .warp_roles import around, asks_shared, in_front, meets_around, together
from .. import control_flow
from ..expressions import call
from ..faults import fault
from ..lanes import Action, LaneFrame, uniform


def synchronised(handler: Callable[[Any, Any], Action]) -> Callable[[Any, Any], Action]:
    """The handler of a statement; warp roles synchronise before and after a per-thread statement on shared memory."""

    def compile_synchronised(c: TileContext, s: Stmt) -> Action:
        if c.gathered or not meets_around(c, s):
            action = handler(c, s)
            return action if c.gathered or not asks_shared(c, s) else in_front(c, s, action)
        with c.having(gathered=True):
            action = handler(c, s)
            if isinstance(s, Store) and s.buffer.scope_name not in PRIVATE and not c.launch.divergence.of(s):
                # All threads do the same, as in S[0] = S[0] + 1: execute it once, not once for each warp role.
                return together(c, s, action)
            return around(c, s, action)

    return compile_synchronised


def compile_if(c: TileContext, s: If) -> Action:
    """A condition on warp groups determines which warp roles reach each branch."""
    reach = {r: holds_in(s.cond, c.launch.warp_roles[r].warps[0]) for r in c.members}
    if all(holds is None for holds in reach.values()):
        return control_flow.compile_if(c, s)
    cond = c.expr(s.cond)
    with c.having(members=tuple(r for r, holds in reach.items() if holds is not False)):
        then = c.stmt(s.then)
    with c.having(members=tuple(r for r, holds in reach.items() if holds is not True)):
        orelse = c.stmt(s.orelse) if s.orelse is not None else None
    return control_flow.branch(cond, then, orelse)


def evaluate(c: TileContext, s: Evaluate) -> Action:
    """A call whose result is not used."""
    if c.launch.warp_roles and s.call.op in SYNC_OPS:  # not c.expr, which caches: depends on the warp roles
        fn = call(c, s.call)
        return lambda f: fn(f) and None
    return control_flow.evaluate(c, s)


def parallel(c: TileContext, s: Parallel) -> Action:
    """Each warp role runs a loop that sets its variables; all other effects of a loop happen once."""
    with c.having(gathered=True):  # iterations belong to no warp role
        action = ParallelLoop(c, s).action()
    once = any(isinstance(n, Evaluate) or isinstance(n, Store) and n.buffer.scope_name not in PRIVATE for n in walk(s))
    return together(c, s, action) if once else action


def tile_op(c: TileContext, s: Any) -> Action:
    """A tile op by its NumPy reference: for each thread where it uses per-thread buffers, else once for the block."""
    if not hasattr(s, "reference"):
        raise fault("sim-unsupported", f"T.{s.op_name} has no NumPy reference",
                    expected="a tile operation with a NumPy reference", found=f"T.{s.op_name}", span=s.span)
    s = scalar_elements(s)
    env = TileEnv.compile(c, s)
    private = any(isinstance(n, Region) and n.buffer.scope_name in PRIVATE for n in walk(s))

    def run(f: LaneFrame) -> None:
        if not f.any_active():
            return
        if private and f.lanes > 1:
            for lane in np.flatnonzero(f.active()):
                s.reference(env(f, int(lane)))
        else:
            s.reference(env(f, None))

    if private:
        return run
    action = run if not isinstance(s, Copy) or s.plan.dst_block is None else to_block(c, s, run)
    return together(c, s, _signalling(c, s, action) if isinstance(s, Copy) else action)


def _signalling(c: TileContext, s: Any, action: Action) -> Action:
    """A TMA Copy: signals its bytes on its barrier (`barrier` = (buffer, index)); with `expect` it announces them first.

    A copy that several blocks of a cluster do together (`cluster_split`) fills only the tile of its own block, and signals
    some of its bytes in each of the blocks.
    """
    if s.plan.barrier is None:
        return action
    buffer, index = s.plan.barrier
    bar, expects = TileBarrier(c, buffer, index, s.span), s.plan.expect
    cta = c.expr(s.plan.dst_block) if s.plan.dst_block is not None else None
    split = s.plan.cluster_split
    rank_in_split, mask = (None, None) if split is None else (c.expr(convert(split[0])), c.expr(convert(split[2])))
    item, extents = s.dst.dtype.bits, [c.expr(e) if isinstance(e, Expr) else e for e in s.dst.extents]

    def run(f: LaneFrame) -> None:
        action(f)
        if f.any_active():
            n = math.prod(e if isinstance(e, int) else int(uniform(e(f), f, "an extent", s.span))
                          for e in extents)
            if rank_in_split is not None and mask is not None:
                first = int(uniform(rank_in_split(f), f, "the rank of a block", s.span)) == 0
                each = n * item // 8 // split[1]
                mine = n * item // 8 - each * (split[1] - 1) if first else each
                to = int(uniform(mask(f), f, "a mask of blocks", s.span))
                for other in range(to.bit_length()):
                    if to >> other & 1:
                        bar.get(f, other).receive(mine)
                return
            rank = None if cta is None else int(uniform(cta(f), f, "the rank of a block", s.span))
            bar.get(f, rank).receive(0 if expects else n * item // 8)

    return run
