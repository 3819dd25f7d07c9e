import tilelang.language as T


@T.macro
def bump(x, y):
    return x + y


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        A[0] = bump(A[0])
