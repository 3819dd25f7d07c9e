import numpy as np

import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def double(A, blk: int = 32):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    B = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, blk), threads=32) as bx:
        for i in T.Parallel(blk):
            B[bx * blk + i] = A[bx * blk + i] * 2.0
    return B


double(np.ones(4, np.float32), M=4)
