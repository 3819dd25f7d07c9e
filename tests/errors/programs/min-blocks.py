import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(8):
        T.annotate_min_blocks_per_sm(0)
        A[0] = 1
