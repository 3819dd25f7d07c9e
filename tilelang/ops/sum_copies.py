"""The end of sums that the holders of a fragment's copies kept apart (transform/lower/defer_reductions.py makes them)."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Attrs, For, Region, Span, Stmt, Store, TileOp, const, fresh, load, seq, tile_op

from .base import Access, LowerContext
from .lower_reduce import from_lane, in_whole_warps, split_at_warp


@tile_op("sum_copies")
class SumCopies(TileOp):
    """Every copy of an element of dst becomes the sum of its copies: until here each held a part of the value.

    dst: a whole fragment, whose copies lie in lanes of one warp.  As a statement on tiles it does nothing: an element is
    one value, however many threads hold it.
    """

    dst: Region
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """The value is what it was."""

    def infer_layout(self, known: Any) -> dict[Any, Any]:
        """Nothing: it is placed when layouts are known."""
        return {}

    def lower(self, cx: LowerContext) -> Stmt:
        """Butterflies over the lanes with copies, register by register."""
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
        """Nothing a user could get wrong: users do not write it."""

    def accesses(self) -> tuple[Access, ...]:
        return (Access(self.dst, "readwrite"),)


__all__ = ["SumCopies"]
