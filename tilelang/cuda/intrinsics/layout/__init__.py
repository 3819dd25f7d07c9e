"""Layouts of tensor-core operands."""

from . import mma_layout

__all__ = ["mma_layout"]
