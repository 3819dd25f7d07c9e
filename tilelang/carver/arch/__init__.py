"""Architectures and the device driver's facts."""

from . import driver
from .cuda import CUDA

__all__ = ["CUDA", "driver"]
