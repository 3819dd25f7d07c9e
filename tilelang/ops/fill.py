"""T.fill and T.clear."""

from __future__ import annotations

from tilelang.ir import Attrs, Expr, Region, Span, Stmt, TileOp, cast, tile_op

from .base import LowerContext
from .pairing import lower_elementwise


@tile_op("fill")
class Fill(TileOp):
    """dst[...] = value (cast to dst's dtype).  Block-collective; any scope."""

    dst: Region
    value: Expr
    attrs: Attrs = ()
    span: Span | None = None

    def lower(self, cx: LowerContext) -> Stmt:
        """Each element stored once by each of its owners."""
        value = cast(self.value, self.dst.dtype)
        return lower_elementwise(cx, self.dst, None, lambda _: value, self.span)
