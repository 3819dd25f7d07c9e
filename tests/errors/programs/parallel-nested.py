import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8, 8), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(8):
            A[i, 0] = 1.0
            for j in T.Parallel(8):
                A[i, j] = 0.0


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
