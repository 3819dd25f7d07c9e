import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((16, 16), "float32")
        T.annotate_layout({F: lambda i, j: i * 16 + j})
        T.copy(A, F)
