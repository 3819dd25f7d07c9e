"""Products with a 2:4 sparse operand."""

from tilelang.language.sparse import gemm_sp

__all__ = ["gemm_sp"]
