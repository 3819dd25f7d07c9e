"""Tensor-core code by hand: emitters, layouts of micro tiles (language 22)."""

from tilelang.language.tensor_core import (
    INT4TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitterWithLadderTransform,
    get_ldmatrix_offset,
    get_mma_micro_size,
    get_swizzle_layout,
    make_mma_swizzle_layout,
    mma_store_index_map,
)

from tilelang.language.unavailable import refusals

from . import sparse_layout
from .layout import mma_layout

globals().update(refusals("is not available: operands permuted beforehand are not; use INT4TensorCoreIntrinEmitter",
                          "INT4TensorCoreIntrinEmitterWithLadderTransform"))

__all__ = ["INT4TensorCoreIntrinEmitter", "TensorCoreIntrinEmitter", "TensorCoreIntrinEmitterWithLadderTransform",
           "get_ldmatrix_offset", "get_mma_micro_size",
           "get_swizzle_layout", "make_mma_swizzle_layout", "mma_layout", "mma_store_index_map", "sparse_layout"]
