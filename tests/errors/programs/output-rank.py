import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((4,), "float32"), B: T.Tensor((), "float32")):
    with T.Kernel(1, threads=32):
        B[()] = A[0]


tilelang.compile(main, out_idx=[1], target="cpu")
