import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(8) as b:
        for i in T.Parallel(8):
            if A[i] > 3:
                return
            A[i] = b
