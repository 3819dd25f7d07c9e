import tilelang
import tilelang.language as T


@tilelang.autotune(configs=[16, 32])
@tilelang.jit(target="cpu")
def make(n, block=16):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32")):
        with T.Kernel(n // block):
            A[0] = 1.0
    return main


make(64)
