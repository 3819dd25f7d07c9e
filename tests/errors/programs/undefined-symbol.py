import tilelang
import tilelang.language as T

n = T.dynamic("n")


@T.prim_func
def f(A: T.Tensor((64,), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(64):
            if i < n:
                A[i] = 0.0


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
