import numpy as np

import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def scale(A, factor: int = 2):
    with T.Kernel(1):
        A[0] = A[0] * factor


scale(np.ones(4, np.float32))
