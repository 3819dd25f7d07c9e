import tilelang
import tilelang.language as T

n = T.dynamic("n")


@T.prim_func
def f(A: T.Tensor((n,), "float32")):
    with T.Kernel(1):
        F = T.alloc_fragment((64,), "float32")
        for i in T.Parallel(n):
            F[i] = A[i]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
