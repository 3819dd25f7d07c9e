import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((16, 16), "float32")
        r = T.alloc_fragment((16,), "float32")
        T.copy(A, F)
        T.reduce_sum(A[0:8, :], r, dim=0)
