import tilelang
import tilelang.language as T

width = 40


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=8):
        for i in T.Parallel(8):
            A[i] = A[i] >> width


tilelang.compile(f, target="cpu")
