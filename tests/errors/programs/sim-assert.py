"""A device assertion that does not hold."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile


@T.prim_func
def main(A: T.Tensor((64,), "int32")):
    with T.Kernel(2, threads=32) as bx:
        T.device_assert(A[bx] > 0, "A must be positive", no_stack_info=True)


run_tile(main, [np.zeros(64, np.int32)])
