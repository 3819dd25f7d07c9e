"""Two barriers where one is meant."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        bars = T.alloc_barrier([128, 128])
        T.mbarrier_arrive(bars)
