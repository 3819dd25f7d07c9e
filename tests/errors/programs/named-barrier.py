import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        T.sync_threads(1, 48)
