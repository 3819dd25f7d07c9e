import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4,), "float16"), y: T.Tensor((4,), "float16")):
    return x & y


f.graph()
