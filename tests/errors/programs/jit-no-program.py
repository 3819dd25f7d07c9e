import tilelang
import tilelang.language as T


@tilelang.jit
def make(m):
    @T.prim_func
    def main(A: T.Tensor((m,), "float32")):
        with T.Kernel(1, threads=32):
            A[0] = 1.0

    return m


make(4)
