import tilelang.language as T


@T.prim_func
class Scale:
    factor = 2
