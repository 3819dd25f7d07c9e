"""Plain programs: kernels as people write them, without warp roles, layouts or instructions, by what their schedule needs."""

from . import attention, gathers, gemms, recurrent, rows
from .corpus import CORPUS, Plain, Spec

__all__ = ["CORPUS", "Plain", "Spec"]
