"""The start of a block-wide copy differs between threads."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((16,), "float32")
        tx = T.get_thread_binding()
        T.copy(A[tx], S)


run_tile(main, [np.zeros(64, np.float32)])
