"""A fragment that one role fills and another stores."""

import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=256):
        F = T.alloc_fragment((64, 64), "float16")
        with T.ws(0):
            T.clear(F)
        with T.ws(1):
            T.copy(F, A)


tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"})
