"""The layout algebra of CuTe: not available; each of its names says so.  Layout is this package's own."""

from .layout import Layout as Layout
from .unsupported import CUTE, unsupported

globals().update({name: unsupported(f"layout.cute.{name}", "is not available: this package has no CuTe algebra")
                  for name in CUTE.split()})
__all__ = sorted(["Layout", *CUTE.split()])
