import tilelang.language as T

T.alloc_shared((8,), "float32")
