import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8, 32), "int4")):
    with T.Kernel(1, threads=32):
        A[0, 0] = 3


tilelang.compile(f, target="cpu")
