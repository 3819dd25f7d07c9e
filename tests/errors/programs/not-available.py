import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32")):
    with T.Kernel(1):
        T.alloc_tmem((128, 64), "float32")
