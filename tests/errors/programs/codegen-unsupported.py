import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float8_e3m4")):
    with T.Kernel(1, threads=8) as _:
        A[0] = A[1]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
