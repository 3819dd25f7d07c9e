import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32"), total: T.Tensor((1,), "float32")):
    with T.Kernel(8, threads=64) as bx:
        total[0] += A[bx]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
