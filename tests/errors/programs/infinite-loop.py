import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(1):
        while True:
            A[0] += 1
