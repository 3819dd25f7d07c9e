import tilelang.language as T

T.dynamic("m, 2n")
