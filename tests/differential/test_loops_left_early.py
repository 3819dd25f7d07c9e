"""Loops that threads leave by break or continue, in which they meet: on every execution."""

import numpy as np
import pytest
from executions import agree

import tilelang.language as T

I32 = np.int32


@pytest.mark.parametrize("leave", ["break", "continue"])
@pytest.mark.parametrize("nested", [False, True])
def test_all_threads_of_a_branch_leave_a_round_in_which_they_exchange(leave, nested):
    """On the CPU the jump left the loop over the threads instead, and the program's loop went on."""
    @T.prim_func
    def f(O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            x = T.alloc_var("int32", init=1)
            if tx >= 32 and tx < 96:
                for r in T.serial(5):
                    x = x + T.shfl_xor(x + tx, 1)
                    if leave == "break":
                        if nested:
                            if r >= 1:
                                x = x + 5
                                if r < 4:
                                    break
                        elif r == 1:
                            break
                    elif nested:
                        if r >= 1:
                            x = x + 5
                            if r < 4:
                                continue
                    elif r == 1:
                        continue
                    x = x * 3
            O[tx] = x

    t = np.arange(32, 96)
    x = np.ones(64, np.int64)
    for r in range(5):
        x = x + (x + t)[(t ^ 1) - 32]
        x = x + 5 * (nested and r >= 1)
        if leave == "break" and r == 1:
            break
        if leave == "continue" and (nested and 1 <= r < 4 or r == 1):
            continue
        x = x * 3
    o = np.ones(128, I32)
    o[32:96] = x
    agree(f, [np.zeros(128, I32)], {0: o})
