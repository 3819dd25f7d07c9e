import tilelang.language as T


@T.prim_func
def f(A):
    with T.Kernel(1):
        A[0] = 1
