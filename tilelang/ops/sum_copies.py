"""Final step of a deferred reduction: add the partial sums held in replicated fragment elements.

transform/lower/defer_reductions.py creates these ops.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Attrs, For, Region, Span, Stmt, Store, TileOp, const, fresh, load, seq, tile_op

from .base import Access, LowerContext
from .lower_reduce import from_lane, in_whole_warps, split_at_warp


@tile_op("sum_copies")
class SumCopies(TileOp):
    """Sets every copy of an element of dst to the sum of its copies; before, each copy holds a partial sum.

    dst: a whole fragment whose copies are in lanes of one warp.  The reference interpreter does nothing here: it keeps one
    value for an element, whatever its replication.
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
        """Butterfly shuffles over the lanes that hold copies, register by register."""
        local = cx.local_of(self.dst.buffer)
        lanes, _ = split_at_warp(list(cx.layout_of(self.dst.buffer).copies))
        r = fresh("r")
        mine = load(local, (r,))
        steps: list[Stmt] = []
        for m in lanes:
            mask = m.stride * m.size // 2
            while mask >= m.stride:
                steps.append(Store(local, (r,), mine + from_lane(mine, mask), span=self.span))
                mask //= 2
        return For(r, const(0), const(int(local.shape[0])), "unroll", seq(in_whole_warps(steps, cx)), span=self.span)

    def check(self) -> None:
        """Nothing to check: users cannot write this op."""

    def accesses(self) -> tuple[Access, ...]:
        return (Access(self.dst, "readwrite"),)
