import numpy as np

import tilelang
import tilelang.language as T


@T.prim_func
def scale(A: T.Tensor((4, 8), "float32"), B: T.Tensor((4, 8), "float32"), n: T.int32):
    with T.Kernel(4, threads=32) as bx:
        for j in T.Parallel(8):
            B[bx, j] = A[bx, j] * n


a = np.ones((4, 8), np.float32)
kernel = tilelang.compile(scale, target="cpu")
kernel(a, a, m=2)
