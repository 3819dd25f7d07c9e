import numpy as np

import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def f(A):
    M, N = T.const("M, N")
    A: T.Tensor((M,), "float32")
    with T.Kernel(1):
        A[0] = N


f(np.ones(4, np.float32))
