import tilelang.language as T

n = 3


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    T.assume(n > 4)
    with T.Kernel(1):
        A[0] = 1
