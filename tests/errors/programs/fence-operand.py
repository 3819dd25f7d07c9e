"""Shared memory where registers are meant."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        S = T.alloc_shared((64, 64), "float16")
        T.warpgroup_fence_operand(S)
