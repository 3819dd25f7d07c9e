import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((64,), "float32")
        tx = T.get_thread_binding(0)
        for k in T.serial(tx):
            S[tx] = A[k]
            B[tx] = S[63 - tx]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
