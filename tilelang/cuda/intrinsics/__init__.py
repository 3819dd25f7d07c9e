"""Tensor-core code by hand: emitters, layouts of micro tiles (language 22)."""

from tilelang.language.tensor_core import (
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

_INT4 = "INT4TensorCoreIntrinEmitter INT4TensorCoreIntrinEmitterWithLadderTransform"
globals().update(refusals("is not available: int4 operands run on the int8 instructions of T.gemm and of "
                          "TensorCoreIntrinEmitter", _INT4))

__all__ = ["TensorCoreIntrinEmitter", "TensorCoreIntrinEmitterWithLadderTransform", "get_ldmatrix_offset", "get_mma_micro_size",
           "get_swizzle_layout", "make_mma_swizzle_layout", "mma_layout", "mma_store_index_map", "sparse_layout"]
