"""An address in a table that leads to no memory."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile


@T.prim_func
def main(P: T.Tensor((1,), T.ptr), B: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        A = T.make_tensor(P[0], (8,), "float32")
        T.copy(A, B)


run_tile(main, [np.zeros(1, np.int64), np.zeros(8, np.float32)])
