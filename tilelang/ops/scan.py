"""T.cumsum, T.cumprod, T.cummax and T.cummin: inclusive scans."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (Attrs, Binary, Buffer, Expr, For, If, Region, Select, Span, Stmt, Store, TileOp, Var, cast, const,
                         fresh, load, seq, tile_op, FRAGMENT, GLOBAL, PRIVATE)
from tilelang.ir.numbers import binary_function, to_dtype

from .base import Access, LowerContext
from .distribute import conjunction
from .layouts import same_layout
from .lower_scan import RegisterScan, piece, scannable
from .pairing import offset_indices
from .reduce import COMBINE, identity, reject_reductions
from .tiles import fit

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
        """In registers: those of the fragment, or of pieces of a tile in memory one after another.  Fragments that are not
        distributed in whole runs of lanes are staged in shared memory.  Thread-private arrays are scanned by each thread for
        itself."""
        src, dst = self.src, self.dst
        if any(r.buffer.scope_name in PRIVATE for r in (src, dst)):
            return self._by_each_thread(cx)
        shape = tuple(int(n) for n in src.extents)
        axis, dt = self.dim % len(shape), dst.buffer.dtype
        tile = dst.buffer if dst.is_full and dst.buffer.scope_name == FRAGMENT else None
        if tile is None and src.is_full and src.buffer.scope_name == FRAGMENT:
            tile = cx.new_fragment(f"{dst.buffer.name}_scan", cx.layout_of(src.buffer), dt)
        if tile is not None and scannable(cx.layout_of(tile), axis, cx.num_threads):
            whole = Region(tile, tuple(const(0) for _ in shape), shape)
            scan = RegisterScan(cx, tile, axis, self._combined, const(identity(self.kind, dt), dt), self.reverse)
            return seq(*[] if tile is src.buffer else [self._moved(cx, src, whole, cx.layout_of(tile))], scan.stmts(),
                       *[] if tile is dst.buffer else [self._moved(cx, whole, dst, cx.layout_of(tile))], span=self.span)
        apart = src.buffer.data is dst.buffer.data and src != dst
        if not apart and src.buffer.scope_name != FRAGMENT and dst.buffer.scope_name != FRAGMENT:
            return self._by_pieces(cx, src, dst, shape, axis)
        lines = cx.new_shared(f"{dst.buffer.name}_scan", shape, dt)
        staged = Region(lines, tuple(const(0) for _ in shape), shape)
        return seq(self._moved(cx, src, staged), self._by_pieces(cx, staged, staged, shape, axis),
                   self._moved(cx, staged, dst), span=self.span)

    def _combined(self, a: Expr, b: Expr) -> Expr:
        return Binary(COMBINE[self.kind], a, b, a.dtype)

    def _moved(self, cx: LowerContext, src: Region, dst: Region, layout: Any = None) -> Stmt:
        return cx.parallel(tuple(int(n) for n in src.extents), lambda at: Store(
            dst.buffer, offset_indices(dst, at), cast(load(src.buffer, offset_indices(src, at)), dst.buffer.dtype),
            span=self.span), layout, span=self.span)

    def _by_pieces(self, cx: LowerContext, src: Region, dst: Region, shape: tuple[int, ...], axis: int) -> Stmt:
        """Scan tiles in shared memory: blocks of lines, piece by piece, each loaded into registers, scanned and stored."""
        dt, length, count = dst.buffer.dtype, shape[axis], 1
        for d, n in enumerate(shape):
            count *= n if d != axis else 1
        layout = piece(length, count, axis == len(shape) - 1, cx.num_threads, dt.bits)
        lines, run = layout.shape
        pieces, neutral = -(-length // run), const(identity(self.kind, dt), dt)
        tile, block, step = cx.new_fragment(f"{dst.buffer.name}_piece", layout, dt), fresh("b"), fresh("c")
        carry = cx.new_local(f"{dst.buffer.name}_carry", 1, dt) if pieces > 1 else None
        scan = RegisterScan(cx, tile, 1, self._combined, neutral, self.reverse, carry)

        def place(at: tuple[Var, ...], r: Region) -> tuple[tuple[Expr, ...], Expr | None]:
            left, k = block * lines + at[0], (pieces - 1 - step if self.reverse else step) * run + at[1]
            inside = conjunction(left < count if count % lines else None, k < length if length % run else None)
            index: list[Expr] = [k] * len(shape)
            for d in reversed(range(len(shape))):
                if d != axis:
                    index[d], left = left % shape[d], left // shape[d]
            return offset_indices(r, tuple(index)), inside

        def take(at: tuple[Var, ...]) -> Stmt:
            where, inside = place(at, src)
            value = cast(load(src.buffer, where), dt)
            return Store(tile, at, value if inside is None else Select(inside, value, neutral, dt, True), span=self.span)

        def put(at: tuple[Var, ...]) -> Stmt:
            where, inside = place(at, dst)
            out = Store(dst.buffer, where, load(tile, at), span=self.span)
            return out if inside is None else If(inside, out, span=self.span)

        def body() -> Stmt:
            return seq(cx.parallel(layout.shape, take, layout, span=self.span), scan.stmts(),
                       cx.parallel(layout.shape, put, layout, span=self.span))

        return cx.loop(block, -(-count // lines), lambda: seq(
            None if carry is None else Store(carry, (const(0),), neutral), cx.loop(step, pieces, body)))

    def _by_each_thread(self, cx: LowerContext) -> Stmt:
        src, dst, dt, zero = self.src, self.dst, self.dst.dtype, (const(0),)
        axis = self.dim % len(src.extents)
        acc, length = cx.new_local(f"{dst.buffer.name}_acc", 1, dt), src.extents[axis]

        def scan(at: tuple[Var, ...]) -> Stmt:
            k = fresh("k")
            place = length - 1 - k if self.reverse else k
            where = tuple(at[d] if d != axis else place for d in range(len(src.extents)))
            value = cast(load(src.buffer, offset_indices(src, where)), dt)
            step = seq(Store(acc, zero, self._combined(load(acc, zero), value)),
                       Store(dst.buffer, offset_indices(dst, where), load(acc, zero)))
            return seq(Store(acc, zero, const(identity(self.kind, dt), dt)),
                       For(k, const(0), const(int(length)), "serial", step))

        return cx.private(tuple(1 if d == axis else n for d, n in enumerate(src.extents)), scan, span=self.span)

    def check(self) -> None:
        """Shapes must be equal; shared or fragment (or thread-private local) tiles."""
        if tuple(self.src.extents) != tuple(self.dst.extents):
            raise errors.error("scan-shape", f"cum{self.kind} dst shape {self.dst.extents} must match src shape "
                               f"{self.src.extents}",
                               found=f"{self.dst.extents} for {self.src.extents}", span=self.span)
        if self.kind in ("sum", "prod"):
            reject_reductions(self.dst, self.span)
        for r in (self.src, self.dst):
            if r.buffer.scope_name == GLOBAL:
                raise errors.error("scan-scope",
                                   f"T.cum{self.kind} works on shared and fragment tiles, `{r.buffer.name}` is global",
                                   found=f"`{r.buffer.name}` in global memory", span=self.span,
                                   hint="T.copy the tile to shared memory first")

    def accesses(self) -> tuple[Access, ...]:
        if self.src.buffer is self.dst.buffer:
            return (Access(self.dst, "readwrite"),)
        return Access(self.src, "read"), Access(self.dst, "write")
