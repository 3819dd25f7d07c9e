import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4, 5), "float32")):
    return T.softmax(x, dim=1)


f.graph()
