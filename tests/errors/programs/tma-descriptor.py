"""A descriptor whose extents are not those of the tensor."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((128, 64), "float16")):
    with T.Kernel(1, threads=128):
        T.create_tma_descriptor("float16", 2, A.data, 128, 64, 2, 128, 64, 64, 1, 1, 0, 3, 2, 0)
