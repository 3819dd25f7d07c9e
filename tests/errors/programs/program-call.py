import numpy

import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((4,), "float32"), y: T.Tensor((4,), "float32")):
    return x + y


f.reference(numpy.ones(4, "float32"))
