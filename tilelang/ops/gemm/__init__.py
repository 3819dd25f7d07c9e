"""T.gemm: matrix product of tiles.  Strategies (mma, wgmma, simt) are files beside this one."""

from __future__ import annotations

from tilelang.ir import Attrs, Expr, Region, Span, TileOp, register_literal, tile_op

from .policy import GemmWarpPolicy


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


register_literal("policy", GemmWarpPolicy)

__all__ = ["Gemm", "GemmWarpPolicy"]
