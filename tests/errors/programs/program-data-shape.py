import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4,), "float32")):
    return x[x > 0]


f.graph()
