"""T.fill and T.clear."""

from __future__ import annotations

from tilelang.ir import Attrs, Expr, Region, Span, TileOp, tile_op


@tile_op("fill")
class Fill(TileOp):
    """dst[...] = value (cast to dst's dtype).  Block-collective; any scope."""

    dst: Region
    value: Expr
    attrs: Attrs = ()
    span: Span | None = None
