"""A barrier is missing between writing and reading shared memory."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_device


@T.prim_func
def main(A: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((64,), "int32")
        tx = T.get_thread_binding()
        S[tx] = tx
        A[tx] = S[63 - tx]


run_device(main, [np.zeros(64, np.int32)])
