import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8, 8), "float32")):
    with T.Kernel(1):
        A[0:2, 0:4] = A[2:4, 0:4] * 2
