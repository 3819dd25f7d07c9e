"""A sum in a scalar variable would be a different partial sum in every thread."""

import tilelang.language as T
from tilelang.transform.pipeline import legalized


@T.prim_func
def main(A: T.Tensor((64,), "float32"), C: T.Tensor((1,), "float32")):
    with T.Kernel(1, threads=64):
        total = T.alloc_var("float32", init=0.0)
        for i in T.Parallel(64):
            total = total + A[i]
        C[0] = total


legalized(main.func)
