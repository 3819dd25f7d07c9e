"""Tile ops, one file each: fields, checks, memory accesses, layout inference, lowering and reference semantics."""

from .atomic import AtomicTile
from .base import Access, LowerContext
from .combine import Combine
from .copy import Copy
from .fill import Fill
from .gemm import Gemm, GemmWarpPolicy
from .gemm_sp import SparseGemm
from .plans import AtomicPlan, CopyPlan, GemmSchedule, ReducePlan
from .reduce import Reduce
from .scan import Scan
from .sum_copies import SumCopies
from .transpose import Transpose

__all__ = ["Access", "AtomicPlan", "AtomicTile", "Combine", "Copy", "CopyPlan", "Fill", "Gemm", "GemmSchedule",
           "GemmWarpPolicy", "LowerContext", "Reduce", "ReducePlan", "Scan", "SparseGemm", "SumCopies", "Transpose"]
