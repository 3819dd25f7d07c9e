import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4,), "float32")):
    if x.sum() > 0:
        return x
    return -x


f.graph()
