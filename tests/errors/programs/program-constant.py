import tilelang
import tilelang.language as T


@tilelang.program
def shifted(x: T.Tensor((4, 8), "int32")):
    return x << 40


shifted.graph()
