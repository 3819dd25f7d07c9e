import tilelang
import tilelang.language as T


@T.prim_func
def double(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            B[i] = A[i] * 2


@tilelang.program
def f(x: T.Tensor((32,), "float32")):
    return T.tile(double, x)


f.graph()
