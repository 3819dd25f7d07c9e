import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu")
def make(table):
    @T.prim_func
    def fill(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            T.fill(A, table[0])

    return fill


make(bytearray(b"\x02\x03"))
