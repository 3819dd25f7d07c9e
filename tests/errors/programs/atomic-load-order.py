import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        A[1] = T.atomic_load(A[0], memory_order="release")
