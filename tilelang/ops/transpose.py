"""T.transpose: dst[j, i] = src[i, j] on the last two dimensions."""

from __future__ import annotations

from tilelang.ir import Attrs, Region, Span, TileOp, tile_op


@tile_op("transpose")
class Transpose(TileOp):
    """dst[…, j, i] = src[…, i, j].  Both shared (or fragment); block-collective."""

    src: Region
    dst: Region
    attrs: Attrs = ()
    span: Span | None = None
