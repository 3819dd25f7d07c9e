import tilelang
import tilelang.language as T


@T.prim_func
def f(X: T.Tensor((128,), "float32"), Y: T.Tensor((128,), "float32")):
    with T.Kernel(4, threads=32) as bx:
        for i in T.Parallel(32):
            Y[i] = X[bx * 32 + i]


tilelang.compile(f, target="cpu")
