import tilelang
import tilelang.language as T

m, n = T.dynamic("m, n")


@T.prim_func
def main(A: T.Tensor((m + n,), "float32"), B: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=32):
        B[0] = A[0]


tilelang.compile(main, target="cpu")
