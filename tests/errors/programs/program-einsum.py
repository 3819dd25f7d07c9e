import tilelang
import tilelang.language as T


@tilelang.program
def f(q: T.Tensor((8, 64), "float16"), k: T.Tensor((9, 32), "float16")):
    return T.einsum("qd,kd->qk", q, k)


f.graph()
