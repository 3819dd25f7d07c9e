import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4,), "float32")):
    return T.sofmax(x)


f.graph()
