"""The dialect common to all targets: the language without the names of CUDA instructions."""

from __future__ import annotations

import re

import tilelang.language as _T

_CUDA = re.compile(r"mma_fill|mma_store|ptx_cp_async_bulk|ptx_fence_barrier_init|ptx_ldmatrix|ptx_mma(_block_scale|_sp|_sm70)?"
                   r"|ptx_tcgen05_\w+|ptx_wait_barrier|ptx_wgmma_\w+")

__tilelang_dialect__ = "common"
__all__ = [n for n in _T.__all__ if not _CUDA.fullmatch(n)]
globals().update({n: getattr(_T, n) for n in __all__})
