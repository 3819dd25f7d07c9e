import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        for i in range(0, 8, 0):
            A[i] = 1
