from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.jit.outputs import OutputCall


@T.prim_func
def main(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(4):
            B[i] = A[i]


class Foreign:
    """A GPU tensor of a framework that is not torch."""


kernel = tilelang.compile(main, out_idx=[1], target="simulator", execution_backend="tile")
kernel._entry = SimpleNamespace(check=None)
OutputCall(kernel)(Foreign())
