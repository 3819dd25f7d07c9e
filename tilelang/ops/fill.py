"""T.fill and T.clear."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Attrs, Expr, Region, Span, TileOp, tile_op
from tilelang.ir.evaluate import to_dtype


@tile_op("fill")
class Fill(TileOp):
    """dst[...] = value (cast to dst's dtype).  Block-collective; any scope."""

    dst: Region
    value: Expr
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """dst = cast(value)."""
        env.write(self.dst, to_dtype(env.eval(self.value), self.dst.dtype))
