import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        acc = T.alloc_reducer((16,), "float32")
        for i in T.Parallel(16):
            T.reducer_update(acc[i], A[i])
