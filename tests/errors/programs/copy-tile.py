import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32x2"), B: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        T.copy(A, B)
