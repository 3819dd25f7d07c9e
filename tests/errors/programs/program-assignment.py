import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4,), "float32")):
    x[0] = 1.0
    return x


f.graph()
