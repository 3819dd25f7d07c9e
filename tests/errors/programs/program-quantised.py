import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4, 64), "float16"), w: T.Tensor((64, 16), "uint8"), s: T.Tensor((3, 32), "float16")):
    return x @ T.quantised(w, s, "int4")


f.graph()
