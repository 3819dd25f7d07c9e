import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((16, 16), "float32")
        r = T.alloc_fragment((16,), "float32")
        T.copy(A, F)
        T.reduce_with(F, r, lambda a, b: T.atomic_add(A[0, 0], b, return_prev=True), 0.0)
