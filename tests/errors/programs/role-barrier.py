"""A role that needs a barrier while the program computes the numbers of its own."""

import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((2, 128), "float16")):
    with T.Kernel(1, threads=256):
        S = T.alloc_shared((128,), "float16")
        with T.ws(1):
            T.copy(A[0, :], S)
            for i in T.Parallel(128):
                A[1, i] = S[127 - i]
        with T.ws(0):
            for k in T.serial(2):
                T.sync_threads(k + 1, 128)


tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"})
