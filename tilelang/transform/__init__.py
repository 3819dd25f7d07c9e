"""Passes: programs in, programs out.  `pipeline.py` is the one list of them, read top to bottom."""

from .config import PassConfigKey

__all__ = ["PassConfigKey"]
