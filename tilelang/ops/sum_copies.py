"""Final step of a deferred reduction: add the partial sums held in replicated fragment elements.

transform/lower/defer_reductions.py creates these ops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang.ir import (Attrs, Expr, Region, Span, Stmt, Store, TileOp, binary, const, each_register, fresh, load, seq,
                         tile_op, unrolled)

from .base import Access, LowerContext
from .distribute import conjunction, digit, from_fragment
from .lower_reduce import from_lane, in_whole_warps, masks, split_at_warp, warp_of


@tile_op("sum_copies")
class SumCopies(TileOp):
    """Sets every copy of an element of dst to the sum of its copies; before, each copy holds a partial sum.

    dst: a whole fragment whose copies are in lanes of full warps, or in several warps.  The reference interpreter does nothing
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
        to, local, layout = self.dst.buffer, cx.local_of(self.dst.buffer), cx.layout_of(self.dst.buffer)
        lanes, rest = split_at_warp(list(layout.copies), warp_of(cx))
        within = each_register(local, lambda r: seq(in_whole_warps([
            Store(local, (r,), load(local, (r,)) + from_lane(load(local, (r,)), mask), span=self.span)
            for m in lanes for mask in masks(m)], cx)), self.span)
        if not rest:
            return within
        group: Expr = const(0)
        groups, first = 1, None
        for m in rest:
            group, groups = group + digit(cx.thread, m.stride, m.size, cx.num_threads) * groups, groups * m.size
        for m in lanes:
            first = conjunction(first, binary("eq", digit(cx.thread, m.stride, m.size, cx.num_threads), const(0)))
        dist, k = from_fragment(layout, cx.thread), fresh("g")
        sums = cx.exchange((groups, *layout.shape), local.dtype)
        put = cx.distributed(replace(dist, extents=sums.shape, indices=(group, *dist.indices), first=first),
                             lambda at: Store(sums, at, load(local, (dist.register,))), self.span)
        take = cx.parallel(layout.shape, lambda at: seq(Store(to, at, const(0, to.dtype)), unrolled(
            [(k, groups)], Store(to, at, load(to, at) + load(sums, (k, *at)), span=self.span))), span=self.span)
        return seq(within, put, take)

    def check(self) -> None:
        """Nothing to check: users cannot write this op."""

    def accesses(self) -> tuple[Access, ...]:
        return (Access(self.dst, "readwrite"),)
