import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(8, 8):
        T.use_swizzle(4, order="diagonal")
        A[0] = 1
