"""T.reduce_*: combine along one dimension."""

from __future__ import annotations

from tilelang.ir import Attrs, Region, Span, TileOp, tile_op

KINDS = ("sum", "abssum", "max", "absmax", "min", "bitand", "bitor", "bitxor")


@tile_op("reduce")
class Reduce(TileOp):
    """dst[i…] = kind over the elements of src along dim; with clear=False combined once with dst's old value.

    src: whole buffer.  dst: src's shape with dim removed or kept as 1.  kind: one of KINDS.
    Each element is first converted to dst's dtype and combined in it, order unspecified.
    """

    src: Region
    dst: Region
    kind: str
    dim: int
    clear: bool = True
    nan_propagate: bool = False
    attrs: Attrs = ()
    span: Span | None = None
