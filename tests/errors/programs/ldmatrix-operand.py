import tilelang.language as T

T.get_ldmatrix_offset("A", 0, 0, 32, dtype="int8", transposed=True)
