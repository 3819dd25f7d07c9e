import tilelang
import tilelang.language as T


@T.prim_func
def double(A: T.Tensor((4, 2), "float32"), B: T.Tensor((4,), "float32x2")):
    with T.Kernel(4, threads=32) as bx:
        B[bx] = A[bx, 0:2] * 2


tilelang.compile(double, out_idx=[1], target="cpu")
