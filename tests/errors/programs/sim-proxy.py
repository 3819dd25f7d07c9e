"""A bulk store of what threads wrote, with no proxy fence."""

import numpy as np

from tilelang.ir import parse
from tilelang.simulator import run_device

PROGRAM = """
@T.prim_func
def main(A_handle: T.handle):
    A = T.match_buffer(A_handle, "A", (32,), "float32", scope="global", data="A_p")
    with T.Kernel(1, threads=(32, 1, 1)) as (bx, tx, ty, tz):
        S = T.alloc("S", (32,), "float32", scope="shared.dyn", data="S_p")
        S[tx] = 1.0
        T.evaluate(T.call("sync_threads", "void"))
        if tx == 0:
            T.evaluate(T.call("bulk_store", "void", T.address_of(A[0]), T.address_of(S[0]), 128))
            T.evaluate(T.call("bulk_commit", "void"))
            T.evaluate(T.call("bulk_wait", "void", n=0, read=True))
"""
run_device(parse(PROGRAM), [np.zeros(32, np.float32)])
