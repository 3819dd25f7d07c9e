import numpy

import tilelang
import tilelang.language as T


bias = numpy.ones(4, "float32")


@tilelang.program
def f(x: T.Tensor((4,), "float32")):
    return x + bias


f.graph()
