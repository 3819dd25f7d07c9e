"""Which thread runs an iteration is the layout's choice, so a thread's number says nothing there."""

import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=32):
        lane = T.get_thread_binding() % 16
        for i in T.Parallel(64):
            B[i] = A[i] + lane


tilelang.compile(f, target="cpu")
