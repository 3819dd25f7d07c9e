"""Eight iterations store their own number in one element."""

import tilelang
import tilelang.language as T


@T.prim_func
def main(B: T.Tensor((64,), "int32")):
    with T.Kernel(2, threads=32) as bx:
        for i, j in T.Parallel(32, 8):
            B[bx * 32 + i] = j


tilelang.compile(main, target="cpu")
