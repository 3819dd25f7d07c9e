"""A block that reads its neighbour's shared memory and does not wait for the reader of its own."""

import numpy as np

from tilelang.ir import parse
from tilelang.simulator import run_device

PROGRAM = """
@T.prim_func
def main(A_handle: T.handle):
    A = T.match_buffer(A_handle, "A", (64,), "float32", scope="global", data="A_p")
    with T.Kernel(2, threads=(32, 1, 1), cluster=(2, 1, 1)) as (bx, tx, ty, tz):
        S = T.alloc("S", (32,), "float32", scope="shared.dyn", data="S_p")
        S[tx] = 1.0
        T.evaluate(T.call("cluster_sync", "void"))
        A[bx * 32 + tx] = T.call("cluster_load", "float32", T.address_of(S[tx]), T.cast(1 - bx, "uint32"))
"""
run_device(parse(PROGRAM), [np.zeros(64, np.float32)])
