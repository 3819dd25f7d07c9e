"""A sum in a scalar variable would be a different partial sum in every thread."""

import tilelang.language as T
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.lower.lower_tile_ops import lower_tile_ops
from tilelang.transform.framework.pass_ import PassContext, run_passes


@T.prim_func
def main(A: T.Tensor((64,), "float32"), C: T.Tensor((1,), "float32")):
    with T.Kernel(1, threads=64):
        total = T.alloc_var("float32", init=0.0)
        for i in T.Parallel(64):
            total = total + A[i]
        C[0] = total


run_passes(main.func, (infer_layouts, lower_tile_ops), PassContext())
