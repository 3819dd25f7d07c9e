import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((4, 4), "float32"), B: T.StridedTensor((4, 4), (8, 1), "float32")):
    with T.Kernel(1, threads=32):
        B[0, 0] = A[0, 0]


tilelang.compile(main, out_idx=[1], target="cpu")
