"""T.fill and T.clear."""

from __future__ import annotations

from typing import Any

from tilelang import errors
from tilelang.ir import Attrs, Expr, Region, Span, Stmt, Store, TileOp, cast, each_register, tile_op, FRAGMENT
from tilelang.ir.numbers import to_dtype

from .base import Access, LowerContext
from .pairing import lower_elementwise

errors.register("fill-value", TypeError, "a fill value that is not a scalar of the element type",
                "cast the value to the element type")


@tile_op("fill")
class Fill(TileOp):
    """dst[...] = value (cast to dst's dtype).  Executed by the whole block; any scope."""

    dst: Region
    value: Expr
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """dst = cast(value)."""
        env.write(self.dst, to_dtype(env.eval(self.value), self.dst.dtype))

    def lower(self, cx: LowerContext) -> Stmt:
        """Each thread that holds an element stores it."""
        value = cast(self.value, self.dst.dtype)
        if self.dst.buffer.scope_name == FRAGMENT and self.dst.is_full:
            local = cx.local_of(self.dst.buffer)  # padding registers may take the value too
            return each_register(local, lambda r: Store(local, (r,), cx.expr(value), span=self.span), self.span)
        return lower_elementwise(cx, self.dst, None, lambda _: value, self.span)

    def check(self) -> None:
        """Check that value has the element type of dst."""
        if self.value.dtype != self.dst.dtype:
            raise errors.error("fill-value", f"T.fill of `{self.dst.buffer.name}` («{self.dst.dtype}») with a value of type "
                               f"‹{self.value.dtype}›", span=self.span)

    def accesses(self) -> tuple[Access, ...]:
        """The tile is written.  Loads inside `value` are found by walking the expressions."""
        return (Access(self.dst, "write"),)
