"""T.gemm: matrix product of tiles.  Strategies (mma, wgmma, simt) are files beside this one."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Attrs, Expr, Region, Span, Stmt, TileOp, numpy_dtype, register_literal, tile_op
from tilelang.target.mma import MMA_ROWS

from ..base import LowerContext
from ..tiles import widest_product
from .mma import lower_mma
from .policy import GemmWarpPolicy
from .simt import lower_simt


@tile_op("gemm")
class Gemm(TileOp):
    """c[M, N] += op(a) @ op(b), or = when clear_accum.

    a: (M, K), or (K, M) if transpose_a.  b: (K, N), or (N, K) if transpose_b.  c: (M, N).  Leading extents are 1.
    a, b: shared or fragment; c: a whole fragment (CPU and SIMT: any of shared, fragment, local).
    clear_accum: bool Expr (run-time allowed).  Accumulates in c's dtype; synchronous.
    """

    a: Region
    b: Region
    c: Region
    transpose_a: bool
    transpose_b: bool
    policy: GemmWarpPolicy
    clear_accum: Expr
    attrs: Attrs = ()
    span: Span | None = None

    @property
    def m(self) -> int:
        return self.c.extents[-2]

    @property
    def n(self) -> int:
        return self.c.extents[-1]

    @property
    def k(self) -> int:
        return self.a.extents[-2 if self.transpose_a else -1]

    def reference(self, env: Any) -> None:
        """The product in float32 (or wider, or exact integers), added and rounded once to c's dtype."""
        acc = self.c.dtype
        a, b = (t.reshape(t.shape[-2:]) for t in (env.read(self.a), env.read(self.b)))
        product = widest_product(a.T if self.transpose_a else a, b.T if self.transpose_b else b, acc)
        if not bool(env.eval(self.clear_accum)):
            old = env.read(self.c)
            product = product.reshape(old.shape) + old.astype(product.dtype)
        env.write(self.c, product.astype(numpy_dtype(acc)).reshape(env.shape(self.c)))

    def lower(self, cx: LowerContext) -> Stmt:
        """By the strategy that infer_layouts chose: attr `instruction`, the name of a matrix row or "simt"."""
        name = self.attr("instruction", "simt")
        return lower_simt(self, cx) if name == "simt" else lower_mma(self, cx, MMA_ROWS[name])


register_literal("policy", GemmWarpPolicy)

__all__ = ["Gemm", "GemmWarpPolicy"]
