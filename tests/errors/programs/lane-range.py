import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        A[0] = T.extract_lane(A[0:4], 4)
