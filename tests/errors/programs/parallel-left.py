"""What an iteration leaves in a private array is in whichever thread ran it."""

import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=32):
        x = T.alloc_local((2,), "int32")
        for i in T.Parallel(64):
            x[0] = A[i]
        B[T.get_thread_binding()] = x[0]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
