"""T.cumsum and T.cummax: inclusive scans."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Attrs, Region, Span, TileOp, tile_op
from tilelang.ir.evaluate import binary_function, to_dtype

from .tiles import fit


@tile_op("scan")
class Scan(TileOp):
    """dst[…, i, …] = kind over j <= i (>= i when reverse) of src along dim.  kind: sum | max.  src may be dst."""

    src: Region
    dst: Region
    kind: str
    dim: int
    reverse: bool = False
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """Running combination in dst's dtype, one rounding per step."""
        dt = self.dst.dtype
        combine = binary_function({"sum": "add", "max": "max"}[self.kind], dt)
        tile = np.moveaxis(to_dtype(env.read(self.src), dt), self.dim, 0)
        tile = tile[::-1].copy() if self.reverse else tile.copy()
        for i in range(1, len(tile)):
            tile[i] = combine(tile[i - 1], tile[i])
        tile = np.moveaxis(tile[::-1] if self.reverse else tile, 0, self.dim)
        env.write(self.dst, fit(tile, env.shape(self.dst), self.span))
