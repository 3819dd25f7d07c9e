"""Architectures and the device driver's facts."""

from . import driver

__all__ = ["driver"]
