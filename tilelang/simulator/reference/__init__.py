"""The reference interpreter: runs the tile program in NumPy, on whole tiles."""

from .run import run_tile

__all__ = ["run_tile"]
