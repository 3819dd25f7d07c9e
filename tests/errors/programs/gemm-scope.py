import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float16")):
    with T.Kernel(1):
        C = T.alloc_fragment((16, 16), "float32")
        T.gemm(A, A, C)
