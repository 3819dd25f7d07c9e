import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8, 8), "float32")):
    with T.Kernel(1):
        B = T.reshape(A[0:4, :], (32,))
        B[0] = 1
