import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32", layout="row")):
    with T.Kernel(1):
        A[0] = 1
