import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(8):
        A[T.get_block_binding(1)] = 1
