"""Final step of a deferred reduction: add the partial sums held in replicated fragment elements.

transform/lower/defer_reductions.py creates these ops.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Attrs, For, If, Region, Span, Stmt, Store, TileOp, binary, const, fresh, load, seq, tile_op

from .base import Access, LowerContext
from .lower_reduce import WARP, from_lane, in_whole_warps, split_at_warp


@tile_op("sum_copies")
class SumCopies(TileOp):
    """Sets every copy of an element of dst to the sum of its copies; before, each copy holds a partial sum.

    dst: a whole fragment whose copies are in lanes of one warp, or in all threads.  The reference interpreter does nothing
    here: it keeps one value for an element, whatever its replication.
    """

    dst: Region
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """The value does not change."""

    def infer_layout(self, known: Any) -> dict[Any, Any]:
        """No layouts to infer: the op is created after layout inference."""
        return {}

    def lower(self, cx: LowerContext) -> Stmt:
        """Butterfly shuffles over the lanes that hold copies, register by register; then sums over warps by shared memory."""
        local, thread = cx.local_of(self.dst.buffer), cx.thread
        lanes, rest = split_at_warp(list(cx.layout_of(self.dst.buffer).copies))
        r = fresh("r")
        mine = load(local, (r,))
        steps: list[Stmt] = []
        for m in lanes:
            mask = m.stride * m.size // 2
            while mask >= m.stride:
                steps.append(Store(local, (r,), mine + from_lane(mine, mask), span=self.span))
                mask //= 2
        count = int(local.shape[0])
        within = For(r, const(0), const(count), "unroll", seq(in_whole_warps(steps, cx)), span=self.span)
        if not rest:
            return within
        warps, k, g = cx.num_threads // WARP, fresh("r"), fresh("g")
        sums = cx.exchange((warps * count,), local.dtype)
        put = For(k, const(0), const(count), "unroll", If(binary("eq", thread % WARP, const(0, thread.dtype)), Store(sums, (
            thread // WARP * count + k,), load(local, (k,)))), span=self.span)
        k = fresh("r")
        add = Store(local, (k,), load(local, (k,)) + load(sums, (g * count + k,)), span=self.span)
        return seq(within, put, For(k, const(0), const(count), "unroll", seq(Store(local, (k,), const(0, local.dtype)), For(
            g, const(0), const(warps), "unroll", add)), span=self.span))

    def check(self) -> None:
        """Nothing to check: users cannot write this op."""

    def accesses(self) -> tuple[Access, ...]:
        return (Access(self.dst, "readwrite"),)
