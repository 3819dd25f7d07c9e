"""A barrier allocated for one role."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=256):
        with T.ws(1):
            T.alloc_barrier(128)
