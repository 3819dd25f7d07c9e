import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "uint32")):
    with T.Kernel(1):
        B[0] = T.ldg32(A[0] + 1.0)
