"""A number of registers that warp groups do not come in."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        T.set_max_nreg(100, True)
