"""T.cumsum and T.cummax: inclusive scans."""

from __future__ import annotations

from tilelang.ir import Attrs, Region, Span, TileOp, tile_op


@tile_op("scan")
class Scan(TileOp):
    """dst[…, i, …] = kind over j <= i (>= i when reverse) of src along dim.  kind: sum | max.  src and dst may be one."""

    src: Region
    dst: Region
    kind: str
    dim: int
    reverse: bool = False
    attrs: Attrs = ()
    span: Span | None = None
