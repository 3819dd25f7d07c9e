"""Derives hints (tilings of a computation) from the limits of an architecture."""

from .hint import (Hint, IntrinInfo, NoRasterization, Rasterization2DColumn, Rasterization2DRow, Stride, TensorCoreExtraConfig,
                   TileDict)
from .policy import DefaultPolicy, Edge, OutputNode, PrimFuncNode, TensorCorePolicy

__all__ = ["DefaultPolicy", "Edge", "Hint", "IntrinInfo", "NoRasterization", "OutputNode", "PrimFuncNode",
           "Rasterization2DColumn", "Rasterization2DRow", "Stride", "TensorCoreExtraConfig", "TensorCorePolicy", "TileDict"]
