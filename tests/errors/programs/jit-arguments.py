import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def make(m, n=8):
    @T.prim_func
    def scale(A: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=32) as bx:
            for j in T.Parallel(n):
                A[bx, j] *= 2

    return scale


make(n=4)
