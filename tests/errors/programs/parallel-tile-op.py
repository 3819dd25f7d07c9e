import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8, 8), "float32")):
    with T.Kernel(1):
        S = T.alloc_shared((8,), "float32")
        for i in T.Parallel(8):
            T.copy(A[i, 0], S)


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
