"""Carver: templates of common computations recommend tile sizes (hints) that fit an architecture."""

from .arch import CUDA, TileDevice, get_arch
from .roller import DefaultPolicy, Hint, NoRasterization, Rasterization2DColumn, Rasterization2DRow, TensorCorePolicy
from .template import (
    ConvTemplate, ElementwiseTemplate, FlashAttentionTemplate, GEMVTemplate, GeneralReductionTemplate, MatmulTemplate,
)
from .utils import get_rasterization_code, get_roller_hints_from_func, get_roller_hints_from_output_nodes

__all__ = ["CUDA", "ConvTemplate", "DefaultPolicy", "ElementwiseTemplate", "FlashAttentionTemplate", "GEMVTemplate",
           "GeneralReductionTemplate", "Hint", "MatmulTemplate", "NoRasterization", "Rasterization2DColumn",
           "Rasterization2DRow", "TensorCorePolicy", "TileDevice", "get_arch", "get_rasterization_code",
           "get_roller_hints_from_func", "get_roller_hints_from_output_nodes"]
