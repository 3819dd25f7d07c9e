import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 32), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((16, 32), "float32")
        r = T.alloc_fragment((32,), "float32")
        T.copy(A, F)
        T.reduce_sum(F, r, dim=1)
