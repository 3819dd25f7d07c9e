import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=8):
        for i in T.Parallel(8):
            A[i] = i


tilelang.compile(f, target="cuda --arch sm_90")
