import numpy

import tilelang
import tilelang.language as T


@tilelang.program
def f(table, ids):
    return T.gather(table, ids)


f.reference(numpy.ones((4, 2), "float32"), numpy.array([0, 4], "int32"))
