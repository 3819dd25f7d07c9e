import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float16")):
    with T.Kernel(1):
        S = T.alloc_shared((16, 16), "float16")
        C = T.alloc_fragment((16, 16), "float32")
        T.copy(A, S)
        T.gemm(S, S, C, clear_accum=1)
