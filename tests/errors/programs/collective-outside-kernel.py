import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((128,), "float32")):
    for i in T.Parallel(128):
        A[i] = 1.0
    with T.Kernel(1):
        A[0] = 2.0


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
