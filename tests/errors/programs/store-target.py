import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(1):
        v = T.alloc_var("int32")
        v[0] = 1
