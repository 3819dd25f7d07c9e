import tilelang.language as T


@T.macro
def first(A):
    return A[0] > 0


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(1) as b:
        if A[b] > 3 and first(A):
            A[b] = 1
