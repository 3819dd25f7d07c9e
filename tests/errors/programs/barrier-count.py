"""A barrier of no arrivals."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        T.alloc_barrier([128, 0])
