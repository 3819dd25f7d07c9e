import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32")):
    with T.Kernel(1):
        S = T.alloc_shared((16, 16), "float32")
        T.tma_load(A, S)
