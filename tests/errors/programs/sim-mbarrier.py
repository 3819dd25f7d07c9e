"""More threads arrive at an mbarrier than it counts."""

import numpy as np

from tilelang.ir import parse
from tilelang.simulator import run_device

PROGRAM = """
@T.prim_func
def main(A_handle: T.handle):
    A = T.match_buffer(A_handle, "A", (1,), "int32", scope="global", data="A_p")
    with T.Kernel(1, threads=(32, 1, 1)) as (bx, tx, ty, tz):
        bar = T.alloc("bar", (1,), "uint64", scope="shared.barrier", data="bar_p")
        if tx == 0:
            T.evaluate(T.call("mbarrier_init", "void", T.address_of(bar[0]), 16))
        T.evaluate(T.call("sync_threads", "void"))
        T.evaluate(T.call("mbarrier_arrive", "void", T.address_of(bar[0])))
"""
run_device(parse(PROGRAM), [np.zeros(1, np.int32)])
