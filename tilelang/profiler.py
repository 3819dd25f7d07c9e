"""Measuring kernels."""

from tilelang.jit.profiling import Profiler
from tilelang.jit.supply import TensorSupplyType
from tilelang.jit.timing import do_bench

__all__ = ["Profiler", "TensorSupplyType", "do_bench"]
