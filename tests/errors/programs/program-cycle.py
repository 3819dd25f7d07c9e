import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4,), "float32")):
    return f(x) + 1


f.graph()
