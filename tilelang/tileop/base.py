"""tilelang.tileop.base.GemmWarpPolicy is T.GemmWarpPolicy."""

from tilelang.ops.gemm import GemmWarpPolicy

__all__ = ["GemmWarpPolicy"]
