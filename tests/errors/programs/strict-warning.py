import os
from unittest import mock

import tilelang
import tilelang.language as T


@T.prim_func
def fill(A: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        T.fill(A, 2)


with mock.patch.dict(os.environ, TILELANG_STRICT="1"):
    tilelang.compile(fill, target="cpu", pass_configs={"tl.force_let_inline": True})
