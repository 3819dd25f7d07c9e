"""A tile that takes more registers than the threads of its block have."""

from unittest import mock

import tilelang
import tilelang.language as T
from tilelang.runtime import nvrtc


class Full:
    """An NVRTC whose assembler has too few registers: the text must not depend on the installed version."""

    includes = ()

    def compile(self, source, options):
        return 6, ("ptxas fatal   : (C7602) Insufficient registers (128) to compile instruction at line 397 in function "
                   "main_kernel. Try to compile with register target of 154 or higher"), b""


@T.prim_func
def main(A: T.Tensor((256, 256), "float32")):
    with T.Kernel(1, threads=512):
        acc = T.alloc_fragment((256, 256), "float32")
        T.clear(acc)
        T.copy(acc, A)


with mock.patch.object(nvrtc, "choose_nvrtc", lambda *_: Full()):
    tilelang.compile(main, target={"kind": "cuda", "arch": "sm_90a"})
