"""T.copy: move a tile between any two memory scopes, converting the element type."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Attrs, Region, Span, TileOp, tile_op
from tilelang.ir.evaluate import to_dtype

from .tiles import fit


@tile_op("copy")
class Copy(TileOp):
    """dst[...] = cast(src[...]), element by element; synchronous.

    src, dst: regions whose non-unit extents agree in order (the iteration space is settled by the frontend, spec 9).
    attrs: coalesced_width, disable_tma, eviction_policy, prefer_instruction, loop_layout, user keys; and, set by the
    pipeline planner, async_group=True: issue as cp.async and leave completion to a later wait.
    Block-collective.  Any pair of global, shared, fragment and local.
    """

    src: Region
    dst: Region
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """dst = cast(src)."""
        tile = fit(env.read(self.src), env.shape(self.dst), self.span)
        env.write(self.dst, to_dtype(tile, self.dst.dtype))
