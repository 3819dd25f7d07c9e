import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    for i in T.thread_binding(8, thread="threadIdx.w"):
        A[i] = 1
