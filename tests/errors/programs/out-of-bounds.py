import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((256,), "float32")):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((128,), "float32")
        for i in T.Parallel(256):
            S[i] = A[i]


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
