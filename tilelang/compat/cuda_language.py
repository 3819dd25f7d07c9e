"""The dialect of CUDA: `tilelang.language` itself."""

import tilelang.language as _T

__tilelang_dialect__ = "cuda"
__all__ = list(_T.__all__)
globals().update({n: getattr(_T, n) for n in __all__})
