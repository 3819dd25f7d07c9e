import os

import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=32):
        A[0] = 1.0


compiler = os.environ.get("CC")
os.environ["CC"] = "false"  # a command that does nothing and fails
try:
    tilelang.compile(main, target="cpu").export_library("main.so")
finally:
    os.environ.pop("CC") if compiler is None else os.environ.update(CC=compiler)
