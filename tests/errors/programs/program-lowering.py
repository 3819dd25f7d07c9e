import numpy as np

import tilelang
import tilelang.language as T


@tilelang.program(target="cpu")
def f(x: T.Tensor((4, 5), "float64")):
    return T.argsort(x)


f(np.ones((4, 5)))
