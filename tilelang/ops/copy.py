"""T.copy: copy a tile between any two memory scopes, converting the element type."""

from __future__ import annotations

from math import prod
from typing import Any

from tilelang import errors
from tilelang.ir import (AddressOf, Alloc, Attrs, Bind, Buffer, Evaluate, Expr, FRAGMENT, For, GLOBAL, If, Region, Span, Stmt,
                         TileOp, binary, call, cast, const, convert, fresh, region_of, replace, seq, tile_op, with_options)
from tilelang.ir.numbers import to_dtype

from .base import Access, LowerContext
from .bulk import lower_bulk
from .layouts import fit, same_layout
from .ldmatrix import copy_by_ldmatrix, copy_by_stmatrix
from .pairing import differ, iteration_space, lower_elementwise, matched_indices
from .tma import lower_tma_load
from .tma_copy import lower_tma_copy
from .tma_store import store_accumulators, store_tile
from .plans import CopyPlan

errors.register("copy-tile", ValueError, "a copy whose two tiles do not match",
                "both tiles need the same extents and lane counts", expected="tiles of the same extents and lane counts")


@tile_op("copy")
class Copy(TileOp):
    """dst[...] = cast(src[...]), element by element; synchronous.

    src, dst: regions whose non-unit extents agree in order (the frontend determines the iteration space).
    The plan (plans.py) decides how the tile moves and who waits: cp.async with async_group; TMA with tma or bulk (a load
    arrives on the plan's barrier, a store is a bulk group of the issuing thread); else the threads of the block.
    Executed by the whole block.  Any pair of global, shared, fragment and local.
    """

    src: Region
    dst: Region
    attrs: Attrs = ()
    plan: CopyPlan = CopyPlan()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """dst = cast(src)."""
        tile = fit(env.read(self.src), env.shape(self.dst), self.span)
        env.write(self.dst, to_dtype(tile, self.dst.dtype))

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Two whole fragments get the same layout, so the copy is a move between registers of one thread."""
        return same_layout(self.src, self.dst, known)

    def lower(self, cx: LowerContext) -> Stmt:
        """TMA where planned, and for accumulators to global memory.  ldmatrix to an MMA operand's registers, stmatrix from an
        accumulator's.  Else an element loop under a distribution that suits both sides, with cp.async where planned."""
        if self.plan.dst_block is not None or self.plan.by_hand:
            return lower_tma_copy(self, cx)
        if self.plan.bulk:
            return lower_bulk(self, cx)
        if self.plan.lanes:
            return lower_by_lanes(self, cx)
        if self.plan.tma and self.dst.buffer.scope_name == GLOBAL:
            return store_tile(cx, self.src, self.dst, self)
        if self.plan.tma:
            return lower_tma_load(self, cx)
        by_tma = store_accumulators(cx, self.src, self.dst, self)
        if by_tma is not None:
            return by_tma
        by_matrix = copy_by_ldmatrix(cx, self.src, self.dst, self.span) or copy_by_stmatrix(cx, self.src, self.dst, self.span)
        if by_matrix is not None:
            return by_matrix
        return lower_elementwise(cx, self.dst, self.src, lambda v: cast(v, self.dst.dtype), self.span,
                                 loop_layout=self.plan.loop_layout, width=self.plan.coalesced_width,
                                 is_async=self.plan.async_group)

    def by_registers(self) -> list[Stmt]:
        """A fragment, the copy to it, and the copy from there: between the two, what is loaded is in flight."""
        if not all(isinstance(n, int) for n in self.dst.extents):
            return [self]
        b = Buffer(f"{self.dst.buffer.name}_next", tuple(self.dst.extents), self.dst.dtype, FRAGMENT)
        part = region_of(b)
        return [Alloc(b, span=self.span), replace(self, dst=part), with_options(replace(self, src=part), second=True)]

    def check(self) -> None:
        """Non-unit extents must agree in number, and in value where both are static; packed types and handles do not mix."""
        if differ(self.src, self.dst):
            raise errors.error("copy-tile", f"T.copy: tile {self.src.extents} of `{self.src.buffer.name}` does not match tile "
                               f"{self.dst.extents} of `{self.dst.buffer.name}`",
                               found=f"{self.src.extents} and {self.dst.extents}", span=self.span)
        if self.src.dtype.lanes != self.dst.dtype.lanes:
            raise errors.error("copy-tile", f"T.copy converts lane by lane: `{self.src.buffer.name}` is {self.src.dtype}, "
                               f"`{self.dst.buffer.name}` {self.dst.dtype}", found=f"{self.src.dtype} and {self.dst.dtype}",
                               span=self.span)

    def accesses(self) -> tuple[Access, ...]:
        return Access(self.src, "read"), Access(self.dst, "write")


def lower_by_lanes(op: Any, cx: Any) -> Stmt:
    """The asynchronous copies of one lane, of zeros where the source is out of range.

    Lane i of all threads writes chunk i of the tile's storage, and reads what the layout, which is its own inverse, puts there.
    """
    known, threads, count = cx.known, cx.num_threads, op.plan.lanes // op.dst.dtype.bytes
    extents, of_dst, of_src = iteration_space(op.dst, op.src)
    chunks = prod(extents) // count
    steps = -(-chunks // threads)
    r, chunk, saved = fresh("r"), fresh("chunk"), known.analyzer
    known.analyzer = saved.bind(r, 0, steps - 1).bind(chunk, 0, chunks - 1)
    start = tuple(convert(m) for m in op.dst.mins)
    tile = replace(op.dst, mins=tuple(const(0) if d is None else m for m, d in zip(start, of_dst)))
    there = cx.layout_of(op.dst.buffer).offset(matched_indices(tile, of_dst, _unflattened(chunk * count, extents)))
    binds: list[Stmt] = []
    at: list[Expr] = []
    for d, i in enumerate(_unflattened(there, extents)):
        v, step = fresh("ijkl"[d]), count if d == len(extents) - 1 else 1
        binds.append(Bind(v, known.analyzer.simplify(i)))
        known.analyzer, known.divisors[v] = known.analyzer.bind(v, 0, extents[d] - step), step
        at.append(v)
    source = matched_indices(op.src, of_src, tuple(at))
    guard = cx.guard(op.src.buffer, source, width=count)
    storage, (begin,) = cx.physical(op.dst.buffer, tuple(map(cx.expr, start)))
    args = [AddressOf(storage, (begin + chunk * count,)), cx.expr(AddressOf(op.src.buffer, source))]
    known.analyzer = saved
    args += [] if guard is None else [guard]
    inner = seq(*binds, Evaluate(call("cp_async", tuple(args), "void", span=op.span, bytes=op.plan.lanes), span=op.span))
    inner = If(binary("lt", chunk, const(chunks)), inner) if chunks % threads else inner
    return For(r, const(0), const(steps), "unroll", seq(Bind(chunk, r * threads + cx.thread), inner), span=op.span)


def _unflattened(flat: Expr, extents: tuple[int, ...]) -> tuple[Expr, ...]:
    """The indices in a tile of these extents of an element, by its number."""
    out: list[Expr] = []
    for n in reversed(extents[1:]):
        out, flat = [binary("floormod", flat, const(n)), *out], binary("floordiv", flat, const(n))
    return (flat, *out)
