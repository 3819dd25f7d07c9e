import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        x = T.alloc_local((8,), "float32")
        for i in T.Parallel(8):
            x[i] = A[i]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
