import tilelang
import tilelang.language as T

n = T.dynamic("n")


@T.prim_func
def f(A: T.Tensor((n,), "float32"), total: T.Tensor((1,), "float32")):
    with T.Kernel(n, threads=64) as bx:
        total[0] += A[bx]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
