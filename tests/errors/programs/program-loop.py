import tilelang
import tilelang.language as T


@tilelang.program
def f(x: T.Tensor((8, 4), "float16")):
    def step(total, row):
        return total + row.astype("float32"), total

    return T.loop(step, x[0], x)[0]


f.graph()
