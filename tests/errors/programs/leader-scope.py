"""A leader for a part of a warp."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        S, bar = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(128)
        T.tma_copy(A, S, barrier=bar, leader_scope_threads=16)
