import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(128):
            A[i] = T.shfl_xor(A[i], 1)


tilelang.compile(f, target="cpu")
