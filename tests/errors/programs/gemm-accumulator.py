"""The accumulator of a tensor-core gemm is in shared memory."""

import tilelang.language as T
from tilelang.target.target import Target
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.framework.pass_ import PassContext


@T.prim_func
def main(C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        A_s = T.alloc_shared((64, 32), "float16")
        B_s = T.alloc_shared((32, 64), "float16")
        acc = T.alloc_shared((64, 64), "float32")
        T.gemm(A_s, B_s, acc)


infer_layouts(main.func, PassContext(Target({"kind": "cuda", "arch": "sm_80"})))
