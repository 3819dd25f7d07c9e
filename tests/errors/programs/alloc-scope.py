import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        S = T.alloc_buffer((8,), "float32", scope="texture")
        A[0] = S[0]
