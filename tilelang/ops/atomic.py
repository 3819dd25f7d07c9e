"""The tile op of T.atomic_add, T.atomic_max and T.atomic_min."""

from __future__ import annotations

from typing import Any

from tilelang import errors
from tilelang.ir import (AddressOf, Attrs, Evaluate, Expr, Region, Span, Stmt, TileOp, Var, call, cast, load, tile_op,
                         DYNAMIC, GLOBAL, STATIC, PRIVATE)
from tilelang.ir.numbers import binary_function, to_dtype
from tilelang.target.instructions import ATOMIC_DTYPES

from .base import Access, LowerContext
from .bulk import lower_bulk
from .pairing import differ, iteration_space, matched_indices
from .layouts import fit
from .tma_store import store_accumulators, store_tile
from .plans import AtomicPlan

errors.register("atomic-dtype", TypeError, "an atomic on an element type that has none", "use one of the types named above")
errors.register("atomic-scope", ValueError, "an atomic on memory that is private to a thread",
                "atomics work between threads: use global or shared memory", expected="global or shared memory")


@tile_op("atomic")
class AtomicTile(TileOp):
    """dst[...] = kind(dst[...], value[...]) atomically per element, each element once per block.

    kind: add | max | min.  dst: global or shared region.  value: a Region of as many elements, or a scalar Expr.
    """

    dst: Region
    value: Region | Expr
    kind: str
    attrs: Attrs = ()
    plan: AtomicPlan = AtomicPlan()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """dst = kind(dst, cast(value)), each element once."""
        dt, shape = self.dst.dtype, env.shape(self.dst)
        value = fit(env.read(self.value), shape, self.span) if isinstance(self.value, Region) else env.eval(self.value)
        env.write(self.dst, binary_function(self.kind, dt)(env.read(self.dst), to_dtype(value, dt)))

    def lower(self, cx: LowerContext) -> Stmt:
        """A TMA add reduction of the whole tile where types and layouts allow; else one scalar atomic for each element, by the
        first of the threads that hold it."""
        other = self.value if isinstance(self.value, Region) else None
        if other is not None and self.by_tma:
            if self.plan.tma:
                return store_tile(cx, other, self.dst, self, reduce=True)
            if self.plan.bulk:
                return lower_bulk(self, cx, "tma_reduce_add")
            out = store_accumulators(cx, other, self.dst, self, reduce=True)
            if out is not None:
                return out
        if self.plan.use_tma:
            raise errors.error("atomic-option", "use_tma: this tile cannot be added by TMA: " + (
                cx.stores.reason(self.dst.buffer) or "it is neither a whole shared tile nor an accumulator of wgmma"),
                               expected="a whole shared tile or an accumulator of wgmma", found="another tile",
                span=self.span, hint="leave use_tma out")
        return self.elementwise(cx)

    def elementwise(self, cx: Any) -> Stmt:
        """One scalar atomic for each element, in loops of cx."""
        other = self.value if isinstance(self.value, Region) else None
        extents, of_dst, of_value = iteration_space(self.dst, other)

        def body(at: tuple[Var, ...]) -> Stmt:
            value = self.value if other is None else load(other.buffer, matched_indices(other, of_value, at))
            where = AddressOf(self.dst.buffer, matched_indices(self.dst, of_dst, at))
            return Evaluate(call(f"atomic_{self.kind}", (where, cast(value, self.dst.dtype)), self.dst.dtype,
                                 span=self.span, order=self.plan.memory_order or "relaxed"), span=self.span)

        if other is not None and other.buffer.scope_name in PRIVATE:
            return cx.private(extents, body, span=self.span)  # each thread adds its own values
        return cx.parallel(extents, body, span=self.span)

    @property
    def by_tma(self) -> bool:
        """Whether TMA supports this kind."""
        return self.kind == "add" and self.plan.memory_order in (None, "relaxed")

    def check(self) -> None:
        """dst must be in global or shared memory, of a type with atomics, and have as many elements as value."""
        dt, scope = self.dst.dtype, self.dst.buffer.scope_name
        if dt not in ATOMIC_DTYPES:
            raise errors.error("atomic-dtype", f"T.atomic_{self.kind} is not defined on ‹{dt}›, expected «one of "
                               f"{', '.join(ATOMIC_DTYPES)}»", span=self.span)
        if scope not in (GLOBAL, STATIC, DYNAMIC):
            raise errors.error("atomic-scope", f"T.atomic_{self.kind} needs global or shared memory, `{self.dst.buffer.name}` "
                               f"is {scope}", found=f"`{self.dst.buffer.name}` in {scope}", span=self.span)
        if isinstance(self.value, Region) and differ(self.value, self.dst):
            raise errors.error("copy-tile", f"T.atomic_{self.kind}: tile {self.value.extents} does not match "
                               f"{self.dst.extents}", found=f"{self.value.extents} and {self.dst.extents}", span=self.span)

    def accesses(self) -> tuple[Access, ...]:
        if isinstance(self.value, Region):
            return Access(self.value, "read"), Access(self.dst, "atomic")
        return (Access(self.dst, "atomic"),)
