"""The device simulator runs lowered programs: a tile operation has no meaning per thread."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_device


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((64,), "float32")
        T.copy(A, S)


run_device(main, [np.zeros(64, np.float32)])
