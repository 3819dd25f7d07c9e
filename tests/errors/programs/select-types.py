import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1) as b:
        A[0] = T.Select(b > 0, A[1], T.int32(1))
