import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((16,), "float32")
        T.clear(F)
        A[0] = T.atomic_add(A, F, return_prev=True)
