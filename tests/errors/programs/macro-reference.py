import tilelang.language as T


@T.macro
def bump(x: T.Ref):
    x = x + 1


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        bump(A[0] + 1)
