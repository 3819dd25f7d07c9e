import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    T.clear(A)
