"""T.transpose: dst[j, i] = src[i, j] on the last two dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Attrs, Region, Span, Stmt, Store, TileOp, Var, cast, load, tile_op
from tilelang.ir.evaluate import to_dtype

from .base import LowerContext
from .pairing import offset_indices
from .tiles import fit


@tile_op("transpose")
class Transpose(TileOp):
    """dst[…, j, i] = src[…, i, j].  Both shared (or fragment); block-collective."""

    src: Region
    dst: Region
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """dst = src with its last two dimensions exchanged."""
        tile = fit(np.swapaxes(env.read(self.src), -1, -2), env.shape(self.dst), self.span)
        env.write(self.dst, to_dtype(tile, self.dst.dtype))

    def lower(self, cx: LowerContext) -> Stmt:
        """An element loop over the destination."""
        def body(at: tuple[Var, ...]) -> Stmt:
            src = (*at[:-2], at[-1], at[-2])
            value = load(self.src.buffer, offset_indices(self.src, src))
            return Store(self.dst.buffer, offset_indices(self.dst, at), cast(value, self.dst.dtype), span=self.span)

        return cx.parallel(tuple(self.dst.extents), body, span=self.span)
