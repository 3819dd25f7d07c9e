"""A kernel that calls another one."""

import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def ones(X):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    with T.Kernel(1, threads=32):
        X[0] = 1.0


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        ones(A)
