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

from tilelang.language.unavailable import UNAVAILABLE, unavailable_names

from . import sparse_layout
from . import mma_layout

# Names that T has too, each of which says for what hardware or by what statement.
_OTHERS = """SparseTensorCoreIntrinEmitter TCGEN05DescriptorParams TCGEN05TensorCoreIntrinEmitter
    TensorCoreIntrinEmitterSM120 WGMMADescriptorParams WGMMATensorCoreIntrinEmitter
    WGSparseTensorCoreIntrinEmitter compute_gmma_descriptor
    compute_umma_descriptor"""
globals().update({name: UNAVAILABLE[name] for name in _OTHERS.split()})
globals().update(unavailable_names("is not available: operands permuted beforehand are not; use INT4TensorCoreIntrinEmitter",
                          "INT4TensorCoreIntrinEmitterWithLadderTransform"))

__all__ = ["INT4TensorCoreIntrinEmitter", "TensorCoreIntrinEmitter", "TensorCoreIntrinEmitterWithLadderTransform",
           "get_ldmatrix_offset", "get_mma_micro_size", "get_swizzle_layout", "make_mma_swizzle_layout", "mma_layout",
           "mma_store_index_map", "sparse_layout", *_OTHERS.split()]
