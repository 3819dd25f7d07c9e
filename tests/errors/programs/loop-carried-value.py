import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(1):
        count = 0
        for i in T.serial(8):
            count = count + 1
            A[i] = count
