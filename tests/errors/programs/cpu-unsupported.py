import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((32, 32), "float32")):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((32, 32), "float32")
        tx = T.get_thread_binding(0)
        if tx < 32:
            T.copy(A, S)


tilelang.compile(f, target="cpu")
