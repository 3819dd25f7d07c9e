import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=8):
        T.clear(A)


tilelang.compile(f, target="cpu").get_profiler("Auto")
