"""Derives hints (tilings of a computation) from the limits of an architecture."""

from .hint import Hint, IntrinInfo, Stride, TensorCoreExtraConfig, TileDict
from .node import Edge, OutputNode, PrimFuncNode
from .policy import DefaultPolicy, TensorCorePolicy
from .rasterization import NoRasterization, Rasterization2DColumn, Rasterization2DRow

__all__ = ["DefaultPolicy", "Edge", "Hint", "IntrinInfo", "NoRasterization", "OutputNode", "PrimFuncNode",
           "Rasterization2DColumn", "Rasterization2DRow", "Stride", "TensorCoreExtraConfig", "TensorCorePolicy", "TileDict"]
