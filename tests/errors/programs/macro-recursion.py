import tilelang.language as T


@T.macro
def down(A, n):
    A[n] = 0.0
    down(A, n)


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        down(A, 7)
