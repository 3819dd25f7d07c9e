import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((4,), "int32"), B: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=1):
        total = [0]
        for k in T.serial(4):
            total[0] = total[0] + A[k]
        B[0] = total[0]


tilelang.compile(main, target="cpu")
