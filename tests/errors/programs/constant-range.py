import tilelang.language as T


@T.prim_func
def f(I: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=32):
        I[0] = 1 << 40
