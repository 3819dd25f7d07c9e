"""A field of a matrix descriptor that it has no bits for."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        S = T.alloc_shared((64, 64), "float16")
        desc = T.alloc_wgmma_desc()
        T.initialize_wgmma_descriptor(desc, S.access_ptr("r"), 1, 1, 65536)
