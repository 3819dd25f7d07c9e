import tilelang.language as T


@T.macro
def increment(v: T.Ref):
    v = v + 1
    return v


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(1):
        n = T.alloc_var("int32", init=5)
        A[0] = n + increment(n)
