import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(2, 2) as (bx, by, bz):
        A[bx] = by
