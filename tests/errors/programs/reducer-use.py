import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        acc = T.alloc_reducer((16,), "float32", op="sum")
        total = T.alloc_fragment((16,), "float32")
        T.reducer_init(acc)
        for i in T.Parallel(16):
            T.reducer_update(acc[i], A[i])
        for i in T.Parallel(16):
            A[i] = acc[i]
        T.finalize_reducer(acc, total)
