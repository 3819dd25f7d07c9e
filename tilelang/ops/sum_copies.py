"""Final step of a deferred reduction: add the partial sums held in replicated fragment elements.

transform/lower/defer_reductions.py creates these ops.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Attrs, If, Region, Span, Stmt, Store, TileOp, binary, const, each_register, fresh, load, seq,
                         tile_op, unrolled)

from .base import Access, LowerContext
from .lower_reduce import WARP, from_lane, in_whole_warps, masks, split_at_warp


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
        within = each_register(local, lambda r: seq(in_whole_warps([
            Store(local, (r,), load(local, (r,)) + from_lane(load(local, (r,)), mask), span=self.span)
            for m in lanes for mask in masks(m)], cx)), self.span)
        if not rest:
            return within
        warps, count, g = cx.num_threads // WARP, int(local.shape[0]), fresh("g")
        sums, leads = cx.exchange((warps * count,), local.dtype), binary("eq", thread % WARP, const(0, thread.dtype))
        put = each_register(local, lambda r: If(leads, Store(sums, (thread // WARP * count + r,), load(local, (r,)))),
                            self.span)
        return seq(within, put, each_register(local, lambda r: seq(Store(local, (r,), const(0, local.dtype)), unrolled(
            [(g, warps)], Store(local, (r,), load(local, (r,)) + load(sums, (g * count + r,)), span=self.span))), self.span))

    def check(self) -> None:
        """Nothing to check: users cannot write this op."""

    def accesses(self) -> tuple[Access, ...]:
        return (Access(self.dst, "readwrite"),)
