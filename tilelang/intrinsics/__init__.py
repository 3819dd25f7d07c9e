"""Older place of tilelang.cuda.intrinsics."""

from tilelang.cuda.intrinsics import *  # noqa: F403
from tilelang.cuda.intrinsics import __all__ as __all__
