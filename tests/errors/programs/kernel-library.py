import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=32):
        A[0] = 1.0


tilelang.JITKernel.from_database(main, kernel_lib_path=".", target="cpu")
