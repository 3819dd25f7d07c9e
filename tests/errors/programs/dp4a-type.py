import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        c = T.alloc_local((1,), "int32")
        T.dp4a(A[0], A[4], c)
