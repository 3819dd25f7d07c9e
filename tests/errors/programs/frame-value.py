"""A launch that no `with` opens."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    bx = T.Kernel(4, threads=32)
    A[bx * 2] = 1.0
