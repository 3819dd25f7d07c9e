"""T.cumsum, T.cumprod, T.cummax and T.cummin: inclusive scans."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (Attrs, Binary, Buffer, Region, Span, Stmt, Store, TileOp, cast, const, load, region_of, seq, tile_op,
                         FRAGMENT, GLOBAL, PRIVATE)
from tilelang.ir.numbers import binary_function, to_dtype

from .base import Access, LowerContext
from .layouts import fit, same_layout
from .lower_scan import ScanSteps
from .reduce import COMBINE, identity, reject_reductions

errors.register("scan-shape", ValueError, "a scan whose result has another shape than its source", "use one shape for both",
                expected="one shape for source and result")
errors.register("scan-scope", ValueError, "a scan of a buffer in a scope it does not work on",
                "T.copy the tile to shared memory first", expected="a shared or fragment tile")

@tile_op("scan")
class Scan(TileOp):
    """dst[…, i, …] = kind over j <= i (>= i when reverse) of src along dim.  kind: sum | prod | max | min.  src may be dst."""

    src: Region
    dst: Region
    kind: str
    dim: int
    reverse: bool = False
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """Scan in dst's dtype, with one rounding per step."""
        dt = self.dst.dtype
        combine = binary_function(COMBINE[self.kind], dt)
        tile = np.moveaxis(to_dtype(env.read(self.src), dt), self.dim, 0)
        tile = tile[::-1].copy() if self.reverse else tile.copy()
        before = to_dtype(np.full(tile.shape[1:], identity(self.kind, dt)), dt)
        for i in range(len(tile)):
            before = tile[i] = combine(before, tile[i])
        tile = np.moveaxis(tile[::-1] if self.reverse else tile, 0, self.dim)
        env.write(self.dst, fit(tile, env.shape(self.dst), self.span))

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Source and result have the same layout."""
        return same_layout(self.src, self.dst, known)

    def lower(self, cx: LowerContext) -> Stmt:
        """In registers: those of the fragment, or of pieces of the tile one after another.  Each thread scans arrays of its
        own."""
        src, dst = self.src, self.dst
        shape, before = tuple(int(n) for n in src.extents), None
        dt, neutral = dst.buffer.dtype, const(identity(self.kind, dst.buffer.dtype), dst.buffer.dtype)
        private = any(r.buffer.scope_name in PRIVATE for r in (src, dst))
        if src.buffer.data is dst.buffer.data and src != dst and not private:  # a piece overwrites what a later one reads
            old, src = src, region_of(cx.new_shared(f"{src.buffer.name}_scan", shape, dt))
            before = cx.parallel(shape, lambda at: Store(src.buffer, at, load(old.buffer, old.at(*at))))
        tile = next((r.buffer for r in (dst, src) if r.buffer.scope_name == FRAGMENT and r.is_full), None)
        steps = ScanSteps(
            shape, self.dim % len(shape), self.reverse, lambda at: [cast(load(src.buffer, src.at(*at)), dt)],
            lambda at, state: Store(dst.buffer, dst.at(*at), state[0], span=self.span),
            lambda a, b: (None, [Binary(COMBINE[self.kind], a[0], b[0], dt)]), [neutral], self.span)
        if private:
            return steps.by_each_thread(cx)
        return seq(before, steps.lower(cx, None if tile is None else cx.layout_of(tile)), span=self.span)

    def check(self) -> None:
        """Shapes must be equal; shared or fragment (or thread-private local) tiles."""
        if tuple(self.src.extents) != tuple(self.dst.extents):
            raise errors.error("scan-shape", f"cum{self.kind} dst shape {self.dst.extents} must match src shape "
                               f"{self.src.extents}", found=f"{self.dst.extents} for {self.src.extents}", span=self.span)
        if self.kind in ("sum", "prod"):
            reject_reductions(self.dst, self.span)
        for r in (self.src, self.dst):
            if r.buffer.scope_name == GLOBAL:
                raise errors.error("scan-scope", f"T.cum{self.kind} works on shared and fragment tiles, `{r.buffer.name}` is "
                                   "global", found=f"`{r.buffer.name}` in global memory", span=self.span)

    def accesses(self) -> tuple[Access, ...]:
        if self.src.buffer is self.dst.buffer:
            return (Access(self.dst, "readwrite"),)
        return Access(self.src, "read"), Access(self.dst, "write")
