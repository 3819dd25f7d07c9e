"""The dialect of AMD GPUs: the common language; its own names raise errors."""

from tilelang.language.dialect import dialect

globals().update(dialect("rocm", "is for AMD GPUs, which are not available", """tvm_mfma tvm_mfma_store tvm_rdna_wmma
    tvm_rdna_wmma_store MatrixCoreIntrinEmitter MatrixCorePreshuffleIntrinEmitter WMMAIntrinEmitter ds_read_tr16_b64
    ds_read_tr8_b64 mfma mfma_store rdna_wmma rdna_wmma_store make_mfma_swizzle_layout mfma_store_index_map
    mfma_store_index_map_32x32"""))
