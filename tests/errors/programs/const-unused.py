import tilelang.language as T
from tilelang.language.eager import EagerFunction


def f(A):
    M, N = T.const("M, N")
    A: T.Tensor((M,), "float32")
    with T.Kernel(1):
        A[0] = N


EagerFunction(f).trace({})
