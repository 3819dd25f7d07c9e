import tilelang.language as T

scales = {0: 1.0, 1: 2.0}


def scale(block):
    return scales.get(block, 0.0)


@T.prim_func
def f(A: T.Tensor((8,), "float32")):
    with T.Kernel(8, threads=1) as bx:
        A[bx] = scale(bx)
