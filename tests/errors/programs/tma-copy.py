"""Rows that do not divide into panels of shared memory."""

import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 100), "float16")):
    with T.Kernel(1, threads=128):
        S, bar = T.alloc_shared((64, 100), "float16"), T.alloc_barrier(128)
        T.tma_copy(A, S, barrier=bar)


tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"})
