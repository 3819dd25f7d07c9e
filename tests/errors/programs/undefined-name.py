import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(8):
            A[i] = scael * A[i]  # noqa: F821
