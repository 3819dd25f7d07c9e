import tilelang

tilelang.from_fx([1, 2])
