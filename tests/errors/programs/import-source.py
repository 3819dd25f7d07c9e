import pathlib

import tilelang.language as T

SOURCE = pathlib.Path("helpers.cuh")


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1, prelude=SOURCE):
        A[0] = 1.0
