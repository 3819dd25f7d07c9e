import tilelang.language as T
from tilelang.language.eager import EagerFunction


def f(A: T.Tensor((8,), "float32"), block):
    with T.Kernel(1):
        A[0] = block


EagerFunction(f).trace({})
