"""A loop runs one element past the end of a shared buffer."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((64,), "float32")
        for i in T.Parallel(65):
            S[i] = A[i]
        T.copy(S, A)


run_tile(main, [np.zeros(64, np.float32)])
