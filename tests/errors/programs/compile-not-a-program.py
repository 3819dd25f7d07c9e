import tilelang

tilelang.compile(lambda a, b: a + b, target="cpu")
