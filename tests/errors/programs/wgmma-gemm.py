"""A product with too few rows for warp-group instructions."""

import tilelang
import tilelang.language as T


@T.prim_func
def main(C: T.Tensor((32, 32), "float32")):
    with T.Kernel(1, threads=128):
        S, F = T.alloc_shared((32, 64), "float16"), T.alloc_fragment((32, 32), "float32")
        T.clear(S)
        T.wgmma_gemm(S, S, F, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        T.copy(F, C)


tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"})
