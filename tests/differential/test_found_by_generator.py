"""Programs the generator found executions to disagree on, or to refuse: the smallest form of each, named by what was wrong."""

import numpy as np
from executions import HERE, disagreements

import tilelang.language as T

I32 = np.int32


def agree(prim, args, want, on=HERE):
    """Every execution leaves want[i] in argument i, and the others as they were."""
    said = disagreements(prim, args, [want.get(i, a) for i, a in enumerate(args)], on)
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


def test_a_value_made_of_a_value_read_in_a_pipelined_loop_comes_behind_it():
    n = 4

    @T.prim_func
    def f(A: T.Tensor((n, 32), "int32"), O: T.Tensor((n, 32), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            S = T.alloc_shared((32,), "int32")
            L = T.alloc_local((2,), "int32")
            L[0] = 0
            for k in T.Pipelined(n, num_stages=2):
                T.copy(A[k, 0:32], S)
                L[1] = S[tx]
                old = L[0]
                scaled = old * 2
                more = scaled + L[1]
                L[0] = more
                O[k, tx] = T.shfl_xor(more, 1)

    a = np.arange(n * 32, dtype=I32).reshape(n, 32)
    sums = np.zeros(32, I32)
    o = np.zeros_like(a)
    for k in range(n):
        sums = sums * 2 + a[k]
        o[k] = sums[np.arange(32) ^ 1]
    agree(f, [a, np.zeros_like(a)], {1: o}, on=("tile", "sm_80", "sm_90a"))
