import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(8) as b:
        if A[b] > 3:
            return
        A[b] = 1
