"""Programs the generator found executions to disagree on, or to refuse: the smallest form of each, named by what was wrong."""

import numpy as np
from executions import disagreements

import tilelang.language as T

I32 = np.int32


def agree(prim, args, want):
    """Every execution leaves want[i] in argument i, and the others as they were."""
    said = disagreements(prim, args, [want.get(i, a) for i, a in enumerate(args)])
    assert not said, said


def test_a_variable_set_in_a_loop_some_leave_is_one_value_of_a_block_of_half_a_warp():
    @T.prim_func
    def f(O: T.Tensor((2, 16), "int32"), P: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=16):
            tx = T.get_thread_binding()
            v = T.alloc_var("int32", init=6)
            w = T.alloc_var("int32")
            for b in T.serial(2):
                w = 0
                while w < 2:
                    v = v * 3 + w
                    if b == 0:
                        break
                    w = w + 1
                for i in T.Parallel(1):
                    P[b + i] = v
                O[b, tx] = v

    o = np.repeat([[18], [163]], 16, 1).astype(I32)
    agree(f, [np.zeros((2, 16), I32), np.zeros(2, I32)], {0: o, 1: o[:, 0]})
