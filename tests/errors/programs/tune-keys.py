import tilelang
import tilelang.language as T
from tilelang.autotuner import autotune


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(64):
            A[i] = 1.0


@autotune(configs=[{"blk": 32}])
@tilelang.jit(target="cpu")
def make(block=32):
    return main


make()
