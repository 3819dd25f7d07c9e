import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        t = T.get_thread_binding()
        for k in range(8):
            if A[t] == k:
                break
            A[t] = T.cast(T.ballot(A[t] > 3), "int32")


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
