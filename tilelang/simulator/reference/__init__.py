"""The reference interpreter: the tile program, whole tiles at a time, in NumPy."""

from .run import run_tile

__all__ = ["run_tile"]
