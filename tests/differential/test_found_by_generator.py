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


def test_a_column_chosen_at_run_time_goes_from_registers_to_shared_memory():
    @T.prim_func
    def f(A: T.Tensor((48, 16), "int32"), P: T.Tensor((1,), "int32"), O: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128):
            F = T.alloc_fragment((48, 16), "int32")
            S = T.alloc_shared((8,), "float32")
            v = T.alloc_var("int32")
            v = P[0]
            T.copy(A, F)
            T.clear(S)
            T.copy(F[0:8, v + 3], S)
            T.copy(S, O)

    a = np.arange(48 * 16, dtype=I32).reshape(48, 16)
    agree(f, [a, np.array([4], I32), np.zeros(8, np.float32)], {2: a[:8, 7].astype(np.float32)})


def test_branches_on_a_number_read_exclude_each_other():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            L = T.alloc_local((1,), "int32")
            L[0] = 0
            T.copy(A, S)
            if A[0] > 5:
                L[0] = S[63 - tx]
            else:
                for i in T.Parallel(64):
                    S[i] = i
            O[tx] = S[tx] + L[0]

    a = np.arange(64, dtype=I32) * 7 + 6
    agree(f, [a, np.zeros(64, I32)], {1: a + a[::-1]}, on=("tile", "sm_80", "sm_90a"))


def test_one_column_of_a_fragment_goes_to_a_fragment():
    @T.prim_func
    def f(A: T.Tensor((9, 2), "float16"), O: T.Tensor((8,), "float64")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((9, 2), "float16")
            G = T.alloc_fragment((8,), "float64")
            T.copy(A, F)
            T.copy(F[0:8, 1], G)
            T.copy(G, O)

    a = np.arange(18).reshape(9, 2).astype(np.float16)
    agree(f, [a, np.zeros(8)], {1: a[:8, 1].astype(np.float64)})
