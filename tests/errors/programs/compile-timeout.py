import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            for _ in T.unroll(12):  # long for the device compiler, short for what runs beside it
                A[i] = T.sin(T.exp(A[i]) * 2.0)


with tilelang.env.using(TILELANG_COMPILE_TIMEOUT_SECONDS="1e-9", TILELANG_DISABLE_CACHE="1"):
    tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"})
