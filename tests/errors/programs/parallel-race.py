"""Two threads add into one element of shared memory at once."""

import tilelang.language as T
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.lower.lower_tile_ops import lower_tile_ops
from tilelang.transform.framework.pass_ import PassContext, run_passes


@T.prim_func
def main(A: T.Tensor((64,), "float32"), C: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((32,), "float32")
        T.clear(S)
        for i in T.Parallel(64):
            S[i // 2] += A[i]
        T.copy(S, C)


run_passes(main.func, (infer_layouts, lower_tile_ops), PassContext())
