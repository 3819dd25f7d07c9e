import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        for i in T.Pipelined(8, num_stages=-1):
            A[i] = 1
