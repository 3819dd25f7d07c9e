import tilelang
import tilelang.language as T

tilelang.compile(lambda a, b: a + b, target="cpu")
