import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((32, 32), "int32")):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((32, 32), "int32")
        T.copy(A, S)
        T.fill(S, S[0, 0] + 1)
        T.copy(S, A)


tilelang.compile(f, target="cpu")
