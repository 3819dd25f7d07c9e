import numpy as np

import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def double(A):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    B = T.empty((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            B[i] = A[i] * 2
    return B


a = np.ones(8, np.float32)
double(a, out=(a, a))
