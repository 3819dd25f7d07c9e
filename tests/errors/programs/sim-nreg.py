"""A register count that setmaxnreg does not take."""

import numpy as np

from tilelang.ir import parse
from tilelang.simulator import run_device

PROGRAM = """
@T.prim_func
def main(A_handle: T.handle):
    A = T.match_buffer(A_handle, "A", (1,), "int32", scope="global", data="A_p")
    with T.Kernel(1, threads=(384, 1, 1)) as (bx, tx, ty, tz):
        T.evaluate(T.call("set_max_nreg", "void", inc=True, n=100))
"""
run_device(parse(PROGRAM), [np.zeros(1, np.int32)])
