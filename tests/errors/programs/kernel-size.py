import numpy as np

import tilelang
import tilelang.language as T


@T.prim_func
def fill(n: T.int32, A: T.Tensor((8,), "float32")):
    with T.Kernel(T.ceildiv(n, 64), threads=32) as bx:
        A[bx % 8] = 1.0


kernel = tilelang.compile(fill, target="cpu")
kernel(2**31 - 1, np.ones(8, np.float32))
