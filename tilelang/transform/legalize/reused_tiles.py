"""Stores a result through a tile of shared memory that is no longer used, where no memory is left to stage it.

    for k in T.Pipelined(n): … gemm(q, …) …            for k in T.Pipelined(n): … gemm(q, …) …
    copy(c, Y)                                  ->     copy(c, q); copy(q, Y)

From their registers, threads store four bytes of float16 each.  A tile goes by TMA.
"""

from __future__ import annotations

from tilelang.ir import Alloc, Launch, region_of, replace, seq, stmts_of, walk, FRAGMENT, GLOBAL, SHARED
from tilelang.ops import Copy
from tilelang.ops.tma_store import GROUP, STEP_BYTES

from ..analysis.effects import effects
from ..analysis.pipeline_loops import inner_loops
from ..framework.pass_ import TILE, PassContext, pass_
from .held_operands import shared_bytes
from .hopper_features import hopper


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).warp_roles)
def reused_tiles(n: Launch, cx: PassContext) -> Launch | None:
    """Send copies of fragments after the pipelined loop through tiles of their shape that only the loop reads.

    Keeps: every value that is stored.
    """
    body, loops = stmts_of(n.body), inner_loops(n.body)
    staging = n.num_threads // GROUP * STEP_BYTES
    if len(loops) != 1 or loops[0] not in body or n.plan.by_hand or \
            shared_bytes(n, loops[0]) + staging <= cx.target.max_shared_bytes:
        return None
    at = body.index(loops[0])
    busy = {e.storage for s in body[at + 1:] for e in effects(s)} | {e.storage for e in effects(loops[0]) if e.writes}
    free = [x.buffer for x in walk(n.body, Alloc) if x.buffer.scope_name in SHARED and x.buffer.data not in busy]

    out = list(body)
    for k, s in enumerate(body[at + 1:], at + 1):
        if isinstance(s, Copy) and s.src.buffer.scope_name == FRAGMENT and s.src.is_full and s.dst.buffer.scope_name == GLOBAL:
            tile = next((b for b in free if b.shape == s.src.buffer.shape and b.dtype == s.dst.buffer.dtype), None)
            if tile is not None:
                out[k] = seq(replace(s, dst=region_of(tile)), replace(s, src=region_of(tile)))
    return replace(n, body=seq(*out)) if out != list(body) else None
