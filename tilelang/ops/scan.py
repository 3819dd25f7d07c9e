"""T.cumsum and T.cummax: inclusive scans."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (Attrs, Binary, Buffer, For, Region, Span, Stmt, Store, TileOp, Var, cast, const, fresh, load,
                         seq, tile_op)
from tilelang.ir.evaluate import binary_function, to_dtype

from .base import Access, LowerContext
from .layouts import same_layout
from .pairing import offset_indices
from .reduce import identity
from .tiles import fit

errors.register("scan-shape", ValueError, "a scan whose result has another shape than its source",
                "use one shape for both")
errors.register("scan-scope", ValueError, "a scan of a buffer in a scope it does not work on",
                "T.copy the tile to shared memory first")


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

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Source and result share one layout."""
        return same_layout(self.src, self.dst, known)

    def lower(self, cx: LowerContext) -> Stmt:
        """Staged in shared memory, one thread a line: the combination order is the index order."""
        src, dst = self.src, self.dst
        shape = tuple(int(n) for n in src.extents)
        axis = self.dim % len(shape)
        n = shape[axis]
        dt = dst.buffer.dtype
        lines = cx.new_shared(f"{dst.buffer.name}_scan", shape, dt)
        acc = cx.new_local(f"{dst.buffer.name}_acc", 1, dt)
        zero = (const(0),)

        def put(at: tuple[Var, ...]) -> Stmt:
            return Store(lines, at, cast(load(src.buffer, offset_indices(src, at)), dt), span=self.span)

        def scan(at: tuple[Var, ...]) -> Stmt:
            k = fresh("k")
            place = const(n - 1) - k if self.reverse else k
            where = tuple(at[d] if d != axis else place for d in range(len(shape)))
            value = Binary("add" if self.kind == "sum" else "max", load(acc, zero), load(lines, where), dt)
            step = seq(Store(acc, zero, value), Store(lines, where, load(acc, zero)))
            return seq(Store(acc, zero, const(identity(self.kind, dt), dt)), For(k, const(0), const(n), "serial", step))

        def take(at: tuple[Var, ...]) -> Stmt:
            return Store(dst.buffer, offset_indices(dst, at), load(lines, at), span=self.span)

        each_line = tuple(1 if d == axis else m for d, m in enumerate(shape))
        return seq(cx.parallel(shape, put, span=self.span), cx.parallel(each_line, scan, span=self.span),
                   cx.parallel(shape, take, span=self.span), span=self.span)

    def check(self) -> None:
        """Equal shapes; shared or fragment (or per-thread local) tiles."""
        if tuple(self.src.extents) != tuple(self.dst.extents):
            raise errors.error("scan-shape", f"cum{self.kind} dst shape {self.dst.extents} must match src shape "
                               f"{self.src.extents}", span=self.span)
        for r in (self.src, self.dst):
            if r.buffer.scope_name == "global":
                raise errors.error("scan-scope", f"T.cum{self.kind} works on shared and fragment tiles, "
                                                 f"`{r.buffer.name}` is "
                                   "global", span=self.span, hint="T.copy the tile to shared memory first")

    def accesses(self) -> tuple[Access, ...]:
        if self.src.buffer is self.dst.buffer:
            return (Access(self.dst, "readwrite"),)
        return Access(self.src, "read"), Access(self.dst, "write")
