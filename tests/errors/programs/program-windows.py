import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((1, 2, 3), "float32"), w: T.Tensor((4, 2, 5), "float32")):
    return T.conv1d(x, w)


f.graph()
