"""A serial loop reads elements of an accumulator that lie in the registers of other threads."""

import tilelang.language as T
from tilelang.target.target import Target
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.lower.lower_tile_ops import lower_tile_ops
from tilelang.transform.framework.pass_ import PassContext, run_passes


@T.prim_func
def main(C: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=128):
        A_s = T.alloc_shared((64, 32), "float16")
        acc = T.alloc_fragment((64, 64), "float32")
        T.gemm(A_s, A_s, acc, transpose_B=True)
        for i in T.serial(64):
            C[i] = acc[i, 0]


run_passes(main.func, (infer_layouts, lower_tile_ops), PassContext(Target({"kind": "cuda", "arch": "sm_80"})))
