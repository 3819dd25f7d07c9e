import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(8, threads=256), T.ws():
        A[0] = 1
