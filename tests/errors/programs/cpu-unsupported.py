import tilelang
import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        tx = T.get_thread_binding(0)
        A[tx] = T.call_extern("int32", "__vadd4", A[tx], A[tx])


tilelang.compile(f, target="cpu")
