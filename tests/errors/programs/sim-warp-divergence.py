"""A shuffle reads from lanes that do not execute it."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_device


@T.prim_func
def main(A: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        tx = T.get_thread_binding()
        if tx < 16:
            A[tx] = T.shfl_xor(tx, 16)


run_device(main, [np.zeros(32, np.int32)])
