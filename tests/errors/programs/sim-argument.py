"""An array of another element type than the tensor parameter."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        T.fill(A, 1.0)


run_tile(main, [np.zeros(64, np.float64)])
