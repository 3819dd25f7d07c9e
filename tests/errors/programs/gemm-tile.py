"""K of the tile is not a multiple of the instruction's."""

import tilelang.language as T
from tilelang.target.target import Target
from tilelang.transform.infer_layouts import infer_layouts
from tilelang.transform.pass_ import PassContext


@T.prim_func
def main(C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        A_s = T.alloc_shared((64, 24), "float16")
        B_s = T.alloc_shared((24, 64), "float16")
        acc = T.alloc_fragment((64, 64), "float32")
        T.gemm(A_s, B_s, acc)


infer_layouts(main.func, PassContext(Target({"kind": "cuda", "arch": "sm_80"})))
