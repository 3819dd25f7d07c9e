"""T.transpose: dst[j, i] = src[i, j] on the last two dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (Attrs, Buffer, Expr, Region, Span, Stmt, Store, TileOp, Var, cast, is_const, load, tile_op,
                         PRIVATE, FRAGMENT)
from tilelang.ir.numbers import to_dtype

from .base import Access, LowerContext
from .ldmatrix import transpose_bytes
from .layouts import fit

errors.register("transpose-shape", ValueError, "a transpose whose tiles do not match",
                "exchange the last two extents, between two buffers", expected="two tiles, the last two extents exchanged")


@tile_op("transpose")
class Transpose(TileOp):
    """dst[…, j, i] = src[…, i, j].  Each is a tile of any memory.  Executed by the whole block."""

    src: Region
    dst: Region
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """dst = src with its last two dimensions exchanged."""
        tile = fit(np.swapaxes(env.read(self.src), -1, -2), env.shape(self.dst), self.span)
        env.write(self.dst, to_dtype(tile, self.dst.dtype))

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Whole fragments: one layout is the other with the last two dimensions exchanged; no data moves between threads."""
        if not (self.src.is_full and self.dst.is_full):
            return {}
        for have, want in ((self.src.buffer, self.dst.buffer), (self.dst.buffer, self.src.buffer)):
            lay = known.get(have)
            if have.scope_name == want.scope_name == FRAGMENT and lay is not None and known.get(want) is None:
                n = lay.ndim
                return {want: lay.permuted((*range(n - 2), n - 1, n - 2))}
        return {}

    def lower(self, cx: LowerContext) -> Stmt:
        """Bytes in shared memory by ldmatrix and stmatrix, others in an element loop over the destination."""
        by_matrix = transpose_bytes(cx, self.src, self.dst, self.span)
        if by_matrix is not None:
            return by_matrix

        def body(at: tuple[Var, ...]) -> Stmt:
            dst, src = self.places(at)
            value = load(self.src.buffer, src)
            return Store(self.dst.buffer, dst, cast(value, self.dst.dtype), span=self.span)

        if any(r.buffer.scope_name in PRIVATE for r in (self.src, self.dst)):
            return cx.private(self.space, body, span=self.span)
        return cx.parallel(self.space, body, span=self.span)

    @property
    def space(self) -> tuple[Any, ...]:
        """Extents of the loop over the destination; leading ones are 1 where the tile is a stage of a pipelined buffer."""
        n = min(len(self.src.extents), len(self.dst.extents))
        return tuple(self.dst.extents[-n:])

    def places(self, at: tuple[Var, ...]) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        """Indices of dst and of src at a point of the loop over `space`."""
        turned = (*at[:-2], at[-1], at[-2])
        return self.dst.at(*at), self.src.at(*turned)

    def check(self) -> None:
        """The last two extents must be exchanged, leading ones equal (1 where one side lacks them)."""
        a, b = tuple(self.src.extents), tuple(self.dst.extents)
        n = min(len(a), len(b)) - 2
        more, less = (a, b) if len(a) > len(b) else (b, a)
        units = all(is_const(e, 1) for e in more[:len(more) - len(less)])
        if not units or a[len(a) - 2 - n:-2] != b[len(b) - 2 - n:-2] or (a[-2], a[-1]) != (b[-1], b[-2]):
            raise errors.error("transpose-shape", f"T.transpose of `{self.src.buffer.name}` {a} needs a destination "
                               f"«{(*a[:-2], a[-1], a[-2])}», `{self.dst.buffer.name}` is ‹{b}›", span=self.span)
        if self.src.buffer is self.dst.buffer:
            raise errors.error("transpose-shape", "T.transpose in place is not possible",
                               expected="two buffers", found=f"`{self.src.buffer.name}` twice", span=self.span)

    def accesses(self) -> tuple[Access, ...]:
        return Access(self.src, "read"), Access(self.dst, "write")
