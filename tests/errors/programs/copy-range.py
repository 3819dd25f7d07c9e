import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((128, 32), "float32")):
    with T.Kernel(1):
        S = T.alloc_shared((64, 32), "float32")
        T.copy(A[0:128, :], S)
