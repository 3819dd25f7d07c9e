import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        t = T.get_thread_binding()
        F = T.alloc_fragment((64,), "float32")
        T.copy(A, F)
        F[63 - t] = t
        T.copy(F, B)


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
