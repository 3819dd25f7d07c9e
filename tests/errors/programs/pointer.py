import tilelang.language as T


@T.prim_func
def f(n: T.float32):
    with T.Kernel(1):
        A = T.make_tensor(n, (8,), "float32")
        A[0] = 1
