"""The user's layout of an accumulator is not the one its matrix instruction has."""

import tilelang.language as T
from tilelang.target.target import Target
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.framework.pass_ import PassContext


@T.prim_func
def main(C: T.Tensor((16, 8), "float32")):
    with T.Kernel(1, threads=32):
        A_s = T.alloc_shared((16, 16), "float16")
        B_s = T.alloc_shared((16, 8), "float16")
        acc = T.alloc_fragment((16, 8), "float32")
        T.annotate_layout({acc: T.Fragment((16, 8), forward_fn=lambda i, j: (i * 2 + j // 4, j % 4))})
        T.gemm(A_s, B_s, acc)


infer_layouts(main.func, PassContext(Target({"kind": "cuda", "arch": "sm_80"})))
