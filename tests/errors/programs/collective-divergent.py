import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=256):
        if T.get_thread_binding() >= 100:
            for i in T.Parallel(128):
                A[i] = 1.0


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
