import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        acc = T.alloc_reducer((16,), "float32", op="bitor")
        T.reducer_init(acc)
