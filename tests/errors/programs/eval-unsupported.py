"""A function of the user's own source has no NumPy reference."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile


@T.prim_func
def main(A: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(32):
            A[i] = T.call_extern("float32", "my_function", A[i])


run_tile(main, [np.zeros(32, np.float32)])
