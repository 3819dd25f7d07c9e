"""A wait whose number of groups depends on a loop."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        for k in T.serial(4):
            T.wait_wgmma(k)
