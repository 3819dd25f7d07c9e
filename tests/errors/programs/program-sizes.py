import numpy

import tilelang
import tilelang.language as T


n = T.dynamic("n")


@tilelang.program
def f(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
    return x + y


f.reference(numpy.ones(4, "float32"), numpy.ones(5, "float32"))
