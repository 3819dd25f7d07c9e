import tilelang.language as T


@T.prim_func
def f(A: T.Tensor((16,), "int32")):
    with T.Kernel(2, threads=32) as bx:
        tiles = T.PersistentTileScheduler(3, 4, num_workers=2, stateful=False)
        tiles.init(bx)
