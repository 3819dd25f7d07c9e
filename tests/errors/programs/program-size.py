import tilelang
import tilelang.language as T


n = T.dynamic("n")


@tilelang.program
def f(x: T.Tensor((n, 4), "float32")):
    return [x[i] for i in range(x.shape[0])]


f.graph()
