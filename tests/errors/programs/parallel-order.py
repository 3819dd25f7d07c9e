import tilelang.language as T
from tilelang.transform.pipeline import lower
from tilelang.target import Target


@T.prim_func
def f(A: T.Tensor((64,), "float32"), B: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        F = T.alloc_fragment((64,), "float32")
        T.copy(A, F)
        for i in T.Parallel(32):
            F[i] = 7
            B[i] = F[i + 3]


lower(f.func, Target("c"))
