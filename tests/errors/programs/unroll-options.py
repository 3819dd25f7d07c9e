import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        for i in T.unroll(8, explicit=True, unroll_factor=4):
            A[i] = 1
