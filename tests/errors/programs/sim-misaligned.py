"""A vector of four floats at an address that is not a multiple of 16 bytes."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_device


@T.prim_func
def main(A: T.Tensor((130,), "float32"), B: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=32):
        tx = T.get_thread_binding()
        B[T.Ramp(tx * 4, 1, 4)] = A[T.Ramp(tx * 4 + 1, 1, 4)]


run_device(main, [np.zeros(130, np.float32), np.zeros(128, np.float32)])
