"""T.cumsum, T.cumprod, T.cummax and T.cummin: inclusive scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (Attrs, Binary, Buffer, Expr, For, If, Region, Select, Span, Stmt, Store, TileOp, Var, call, cast,
                         const, fresh, load, seq, tile_op, GLOBAL, PRIVATE)
from tilelang.ir.numbers import binary_function, to_dtype

from .base import Access, LowerContext
from .layouts import same_layout
from .pairing import offset_indices
from .reduce import COMBINE, identity, reject_reductions
from .tiles import fit

errors.register("scan-shape", ValueError, "a scan whose result has another shape than its source", "use one shape for both",
                expected="one shape for source and result")
errors.register("scan-scope", ValueError, "a scan of a buffer in a scope it does not work on",
                "T.copy the tile to shared memory first", expected="a shared or fragment tile")

WARP = 32


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
        """Staged in shared memory.  One thread scans a line where there are at least as many lines as threads, else one warp.
        Thread-private arrays are scanned by each thread for itself."""
        src, dst = self.src, self.dst
        if any(r.buffer.scope_name in PRIVATE for r in (src, dst)):
            return self._by_each_thread(cx)
        shape = tuple(int(n) for n in src.extents)
        lines = cx.new_shared(f"{dst.buffer.name}_scan", shape, dst.buffer.dtype)
        count = 1
        for d, n in enumerate(shape):
            count *= n if d != self.dim % len(shape) else 1
        by_warps = cx.num_threads % WARP == 0 and count < cx.num_threads

        def put(at: tuple[Var, ...]) -> Stmt:
            value = cast(load(src.buffer, offset_indices(src, at)), dst.buffer.dtype)
            return Store(lines, at, value, span=self.span)

        def take(at: tuple[Var, ...]) -> Stmt:
            return Store(dst.buffer, offset_indices(dst, at), load(lines, at), span=self.span)

        scan = self._lines_by_warps(cx, lines, shape) if by_warps else self._lines_by_threads(cx, lines, shape)
        return seq(cx.parallel(shape, put, span=self.span), scan, cx.parallel(shape, take, span=self.span),
                   span=self.span)

    def _combined(self, a: Expr, b: Expr) -> Expr:
        return Binary(COMBINE[self.kind], a, b, a.dtype)

    def _lines_by_threads(self, cx: LowerContext, lines: Buffer, shape: tuple[int, ...]) -> Stmt:
        """One thread scans each line in index order."""
        axis, dt, zero = self.dim % len(shape), lines.dtype, (const(0),)
        acc = cx.new_local(f"{self.dst.buffer.name}_acc", 1, dt)

        def scan(at: tuple[Var, ...]) -> Stmt:
            k = fresh("k")
            place = const(shape[axis] - 1) - k if self.reverse else k
            where = tuple(at[d] if d != axis else place for d in range(len(shape)))
            step = seq(Store(acc, zero, self._combined(load(acc, zero), load(lines, where))),
                       Store(lines, where, load(acc, zero)))
            return seq(Store(acc, zero, const(identity(self.kind, dt), dt)),
                       For(k, const(0), const(shape[axis]), "serial", step))

        return cx.parallel(tuple(1 if d == axis else n for d, n in enumerate(shape)), scan, span=self.span)

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

    def _lines_by_warps(self, cx: LowerContext, lines: Buffer, shape: tuple[int, ...]) -> Stmt:
        """A warp scans 32 elements of a line at a time: shuffles by 1, 2, 4, 8, 16 lanes, then the carry from before."""
        dt, zero = lines.dtype, (const(0),)
        value, carry = (cx.new_local(f"{self.dst.buffer.name}_{n}", 1, dt) for n in ("acc", "carry"))
        neutral = const(identity(self.kind, dt), dt)
        mine = load(value, zero)

        def step(inside: Expr, index: tuple[Expr, ...], lane: Expr) -> tuple[Stmt, Stmt]:
            steps: list[Stmt] = [Store(value, zero, Select(inside, cx.expr(load(lines, index)), neutral, dt, True))]
            for shift in (1, 2, 4, 8, 16):
                before = shuffled("shfl_up", mine, shift)
                steps.append(Store(value, zero, Select(lane >= shift, self._combined(before, mine), mine, dt, False)))
            steps.append(Store(value, zero, self._combined(load(carry, zero), mine)))
            steps.append(Store(carry, zero, shuffled("shfl_idx", mine, WARP - 1)))
            buffer, at = cx.physical(lines, index)
            return seq(*steps), Store(buffer, at, mine, span=self.span)

        return warp_chunks(cx, shape, self.dim % len(shape), self.reverse, Store(carry, zero, neutral), step, self.span)

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


def warp_chunks(cx: LowerContext, shape: tuple[int, ...], axis: int, reverse: bool, start: Stmt,
                step: Callable[[Expr, tuple[Expr, ...], Expr], tuple[Stmt, Stmt]], span: Span | None) -> Stmt:
    """Each warp goes over its lines along axis, 32 elements at a time.

    start: statements before each line.  step(whether this lane has an element, its indices, the lane): (statements of all
    lanes, those of lanes that have an element).
    """
    warps, lane = cx.num_threads // WARP, cx.thread % WARP
    it, chunk = fresh("it"), fresh("c")
    line = it * warps + cx.thread // WARP
    place = chunk * WARP + lane
    index: list[Expr] = [const(0)] * len(shape)
    left, count = line, 1
    for d in reversed(range(len(shape))):
        if d != axis:
            index[d] = left % shape[d]
            left, count = left // shape[d], count * shape[d]
    index[axis] = const(shape[axis] - 1) - place if reverse else place
    inside = place < shape[axis]
    steps, stores = step(inside, tuple(index), lane)
    body = For(chunk, const(0), const(-(-shape[axis] // WARP)), "serial", seq(steps, If(inside, stores)))
    whole = seq(start, body)
    guarded = whole if count % warps == 0 else If(line < count, whole)  # uniform within a warp
    return For(it, const(0), const(-(-count // warps)), "serial", guarded, span=span)


def shuffled(op: str, value: Expr, lane: int) -> Expr:
    """The value of another lane; shuffles move 32-bit registers, so narrower types are converted."""
    dt = value.dtype
    if dt.is_int and dt.bits < 32:
        return cast(call(op, (cast(value, "int32"), const(lane)), "int32", width=WARP), dt)
    return call(op, (value, const(lane)), dt, width=WARP)
