import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(8, 8):
        A[0] = 1
        T.use_swizzle(4)
