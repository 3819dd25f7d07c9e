"""A block barrier under a condition that differs between threads."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_device


@T.prim_func
def main(A: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        tx = T.get_thread_binding()
        if tx < 40:
            T.sync_threads()
        A[tx] = tx


run_device(main, [np.zeros(64, np.int32)])
