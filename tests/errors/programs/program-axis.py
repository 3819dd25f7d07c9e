import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4, 5), "float32")):
    return T.softmax(x, axis=2)


f.graph()
