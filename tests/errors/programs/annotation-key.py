import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32")):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((16, 16), "float32")
        T.copy(A, S, annotations={"coalesced_with": 4})
