"""The names of CuTe's layout algebra, which is unsupported: each reports so.  `Layout` is that of this package."""

from .layout import Layout as Layout
from .unsupported import CUTE, unsupported

globals().update({name: unsupported(f"layout.cute.{name}", "is not available: this package has no CuTe algebra")
                  for name in CUTE.split()})
__all__ = sorted(["Layout", *CUTE.split()])
