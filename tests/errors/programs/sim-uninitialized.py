"""An accumulator is used before it is cleared."""

import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile


@T.prim_func
def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        S = T.alloc_shared((64, 64), "float16")
        acc = T.alloc_fragment((64, 64), "float32")
        T.copy(A, S)
        T.gemm(S, S, acc)
        T.copy(acc, C)


run_tile(main, [np.zeros((64, 64), np.float16), np.zeros((64, 64), np.float32)])
