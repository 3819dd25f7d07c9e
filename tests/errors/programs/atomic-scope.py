import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((16,), "float32")
        T.clear(F)
        T.atomic_add(F, 1.0)
