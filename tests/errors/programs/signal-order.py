import tilelang.language as T


@T.prim_func
def f(F: T.SymmTensor((1,), "int64")):
    with T.Kernel(1):
        T.st(F[0], 1, scope="sys", sem="acquire")
