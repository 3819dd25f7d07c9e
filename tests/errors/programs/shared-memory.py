import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((512, 512), "float32")):
    with T.Kernel(1):
        S = T.alloc_shared((256, 256), "float32")
        T.copy(A[0, 0], S)
        T.copy(S, A[256, 256])


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
