"""Names that began as experiments."""

from . import gemm_sp_op

__all__ = ["gemm_sp_op"]
