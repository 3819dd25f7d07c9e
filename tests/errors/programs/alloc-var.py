import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        v = T.alloc_var("int32", 1, init=2)
        A[0] = v
