import numpy

import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4, 5), "float32")):
    return x + 1


f.reference(numpy.ones((4, 5), "float64"))
