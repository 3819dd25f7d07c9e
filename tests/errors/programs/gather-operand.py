import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((16, 16), "float32")
        r = T.alloc_fragment((8, 8), "float32")
        i = T.alloc_fragment((8, 8), "int32")
        T.gather(A, i, r, dim=1)
