import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=128):
        with T.Scale("cluster"):
            T.fill(A, 0)
