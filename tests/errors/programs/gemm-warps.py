"""Eight warps cannot share out an accumulator of two instruction tiles."""

import tilelang.language as T
from tilelang.target.target import Target
from tilelang.transform.infer_layouts import infer_layouts
from tilelang.transform.pass_ import PassContext


@T.prim_func
def main(C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=256):
        A_s = T.alloc_shared((16, 32), "float16")
        B_s = T.alloc_shared((32, 16), "float16")
        acc = T.alloc_fragment((16, 16), "float32")
        T.gemm(A_s, B_s, acc)


infer_layouts(main.func, PassContext(Target({"kind": "cuda", "arch": "sm_80"})))
