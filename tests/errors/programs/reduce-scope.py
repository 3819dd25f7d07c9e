import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 32), "float32")):
    with T.Kernel(1):
        r = T.alloc_fragment((16,), "float32")
        T.reduce_sum(A, r, dim=1)
