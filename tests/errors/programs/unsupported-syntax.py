import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        for i in T.serial(8):
            A[i] = 0
        else:
            A[0] = 1
