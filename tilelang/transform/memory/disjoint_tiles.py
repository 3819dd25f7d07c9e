"""Finds shared tiles that never hold a value at the same time, for launches that may not fit in shared memory otherwise."""

from __future__ import annotations

from tilelang.ir import Alloc, Evaluate, For, Launch, Parallel, Stmt, TileOp, Var, inner, walk, with_options, FRAGMENT, SHARED
from tilelang.target.warp_groups import names_warps

from ..analysis.effects import effects, own_effects
from ..analysis.liveness import Liveness
from ..analysis.pipeline_loops import ring_stages, wanted_stages
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_


@pass_(needs=TILE, of=Launch)
def disjoint_tiles(launch: Launch, cx: PassContext) -> Launch:
    """Give a Launch `disjoint`: pairs of shared buffers with disjoint live ranges, in all iterations of the loops around them.

    for t in …:                                 # disjoint = ((A_s, C_s), …): C_s is written before it is read,
        for k in T.Pipelined(…): … A_s …        # and an iteration of t reads nothing of A_s that an earlier one left
        copy(c, C_s); copy(C_s, C)

    Threads are not known later to write a whole buffer, hence the pass stands in front of lowering.  Passes that give buffers
    versions add the pairs of these (rings).  Skipped: launches that surely fit, and those with warp roles or asynchronous
    copies of the program's own, whose order is that of its barriers.
    """
    limit = getattr(cx.target, "max_shared_bytes", None)
    off = limit is None or cx.option(PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE)
    tiles = [s.buffer for s in walk(launch.body, Alloc) if s.buffer.scope_name in SHARED and s.buffer.is_static]
    loops = [(ring_stages(s), wanted_stages(s)) for s in walk(launch.body, For)]
    most = max((max(n[1]) + 1 if stages is None else stages for stages, n in loops), default=1)  # type: ignore[index]
    fragments = [s.buffer for s in walk(launch.body, Alloc) if s.buffer.scope_name == FRAGMENT and s.buffer.is_static]
    tiled, staged = (sum(b.size * b.dtype.bytes for b in some) for some in (tiles, fragments))
    if off or 2 * (tiled * max(most, 1) + staged) <= int(limit or 0) or launch.plan.by_hand or names_warps(launch.body):
        return launch
    life = Liveness(launch.body)
    meets, bit = _meeting(life, launch.body), life.bit
    pairs = tuple((a, b) for k, a in enumerate(tiles) for b in tiles[k + 1:] if a.data is not b.data
                  and not meets.get(a.data, 0) & bit(b.data) and not meets.get(b.data, 0) & bit(a.data))
    return with_options(launch, disjoint=(*pairs, *((b, b) for b in tiles if not life.carried & bit(b.data))))


def _meeting(life: Liveness, body: Stmt) -> dict[Var, int]:
    """For each storage those that are used, or hold a value, where it is used, as a sum of bits."""
    out: dict[Var, int] = {}
    stack = [body]
    while stack:
        s = stack.pop()
        leaf = isinstance(s, (Parallel, TileOp, Evaluate))
        used = {e.storage for e in (effects(s) if leaf else own_effects(s))}
        there = life.after(s) | sum(map(life.bit, used))
        out.update((x, out.get(x, 0) | there) for x in used)
        stack += () if leaf else inner(s)
    return out
