"""Tile form of T.atomic_add / atomic_max / atomic_min."""

from __future__ import annotations

from typing import Any

from tilelang.ir import AddressOf, Attrs, Evaluate, Expr, Region, Span, Stmt, TileOp, Var, call, cast, load, tile_op
from tilelang.ir.evaluate import binary_function, to_dtype

from .base import LowerContext
from .pairing import iteration_space, matched_indices
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

    def lower(self, cx: LowerContext) -> Stmt:
        """One scalar atomic an element, by the first of its owners."""
        other = self.value if isinstance(self.value, Region) else None
        extents, of_dst, of_value = iteration_space(self.dst, other)

        def body(at: tuple[Var, ...]) -> Stmt:
            value = self.value if other is None else load(other.buffer, matched_indices(other, of_value, at))
            where = AddressOf(self.dst.buffer, matched_indices(self.dst, of_dst, at))
            return Evaluate(call(f"atomic_{self.kind}", (where, cast(value, self.dst.dtype)), self.dst.dtype,
                                 span=self.span, order=self.attr("memory_order") or "relaxed"), span=self.span)

        return cx.parallel(extents, body, span=self.span)
