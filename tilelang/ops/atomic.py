"""Tile form of T.atomic_add / atomic_max / atomic_min."""

from __future__ import annotations

from tilelang.ir import Attrs, Expr, Region, Span, TileOp, tile_op


@tile_op("atomic")
class AtomicTile(TileOp):
    """dst[...] = kind(dst[...], value[...]) atomically per element, each element once per block.

    kind: add | max | min.  dst: global or shared region.  value: a Region of as many elements, or a scalar Expr.
    """

    dst: Region
    value: Region | Expr
    kind: str
    attrs: Attrs = ()
    span: Span | None = None
