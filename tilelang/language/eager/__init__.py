"""The eager style of tilelang.jit, tracing side."""

from .function import COMPILE_TIME, SCALAR, TENSOR, EagerFunction, Parameter, Traced

__all__ = ["COMPILE_TIME", "SCALAR", "TENSOR", "EagerFunction", "Parameter", "Traced"]
