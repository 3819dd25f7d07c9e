import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4, 5), "float32"), i: T.Tensor((3,), "float32")):
    return T.gather(x, i)


f.graph()
