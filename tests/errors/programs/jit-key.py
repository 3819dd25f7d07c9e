import tilelang
import tilelang.language as T


class Settings:
    __hash__ = None

    def __repr__(self):
        return "Settings()"


@tilelang.jit(target="cpu")
def make(settings):
    @T.prim_func
    def fill(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            T.fill(A, 2)

    return fill


make(Settings())
