"""Tile form of T.atomic_add / atomic_max / atomic_min."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Attrs, Expr, Region, Span, TileOp, tile_op
from tilelang.ir.evaluate import binary_function, to_dtype

from .tiles import fit


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

    def reference(self, env: Any) -> None:
        """dst = kind(dst, cast(value)), each element once."""
        dt, shape = self.dst.dtype, env.shape(self.dst)
        value = fit(env.read(self.value), shape, self.span) if isinstance(self.value, Region) else env.eval(self.value)
        env.write(self.dst, binary_function(self.kind, dt)(env.read(self.dst), to_dtype(value, dt)))
