import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16, 16), "float32"), B: T.Tensor((256,), "float32")):
    with T.Kernel(1, threads=32):
        T.annotate_layout({A: lambda i, j: (j, i)})
        flat = T.view(A, (256,), "float32")
        T.copy(flat, B)


tilelang.compile(f, target="cpu")
