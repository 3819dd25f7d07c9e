import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        tx = T.get_thread_binding()
        if tx % 2 == 0:
            A[tx] = T.shfl_xor(A[tx], 1)


tilelang.compile(f, target={"kind": "cuda", "arch": "sm_80"})
