import tilelang
import tilelang.language as T


@T.prim_func
def double(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128) as _:
        tile = T.alloc_shared((64, 16), "float16")
        for k in T.Pipelined(4, num_stages=2):
            T.copy(A[0, k * 16], tile)
            for i, j in T.Parallel(64, 16):
                B[i, k * 16 + j] = tile[i, j] * 2


kernel = tilelang.compile(double, target={"kind": "cuda", "arch": "sm_80"}, execution_backend="simulator")
kernel.schedule(1)
