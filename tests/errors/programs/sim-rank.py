import numpy as np

import tilelang.language as T
from tilelang.simulator import run_tile_ranks


@T.prim_func
def f(A: T.SymmTensor((128,), "float32")):
    with T.Kernel(1):
        T.fill(T.remote(A, T.get_rank() + 1), 0)


run_tile_ranks(f, [[np.zeros(128, np.float32)]] * 2)
