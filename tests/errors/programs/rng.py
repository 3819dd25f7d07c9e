import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "uint32")):
    with T.Kernel(1):
        A[0] = T.rng_rand()
