import tilelang
import tilelang.language as T
from tilelang import tvm


@T.prim_func
def first(A: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=32):
        A[0] = 1.0


@T.prim_func
def second(A: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=32):
        A[0] = 2.0


tilelang.lower(tvm.IRModule({"first": first, "second": second}), target="cpu")
