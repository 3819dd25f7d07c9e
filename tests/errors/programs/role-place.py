"""Warps that do not follow each other."""

import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        if T.get_thread_binding() // 32 % 2 == 1:
            T.fill(A, 1.0)


tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"})
