import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        S = T.alloc_shared((8,), "float32")
        T.copy(A, S, coalesced_width="wide")
