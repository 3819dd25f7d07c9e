import tilelang.language as T
from tilelang.language.eager import EagerFunction


def f(A):
    M = T.const("M")
    A: T.Tensor((M,), "float32")
    with T.Kernel(1):
        A[0] = M


EagerFunction(f).trace({}, {"N": 4})
