import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        with T.ws_op(""):
            A[T.get_thread_binding()] = 1.0
