"""Conditions and bounds that read shared memory which their branch or loop stores in: on every execution.

Threads that read late found what the others had stored already, or of the round before: a barrier was missing on GPUs.
"""

import numpy as np
import pytest
from backends import agree

import tilelang.language as T

I32 = np.int32
A = np.array([0, 1, 0, 1, 0, 1, 0, 0], I32)


def test_a_while_loop_whose_condition_reads_what_it_stores_before_a_continue():
    """The barrier stood at the end of the body, where `continue` passes by."""
    @T.prim_func
    def f(A: T.Tensor((8,), "int32"), O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            x = T.alloc_var("int32", init=0)
            c = T.alloc_var("int32", init=0)
            S[tx] = 0
            while S[5] < 4:
                c = c + 1
                S[(tx + c) % 128] = c
                if A[c] > 0:
                    continue
                x = x + tx * c
            O[tx] = x

    agree(f, [A, np.zeros(128, I32)], {1: (np.arange(128) * 6).astype(I32)})


@pytest.mark.parametrize("leave", ["at the end", "continue", "continue after its own store"])
def test_a_while_loop_beside_roles(leave):
    @T.prim_func
    def f(A: T.Tensor((8,), "int32"), O: T.Tensor((256,), "int32"), P: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            x = T.alloc_var("int32", init=0)
            y = T.alloc_var("int32", init=0)
            c = T.alloc_var("int32", init=0)
            S[tx] = 3
            while S[5] < 7:
                c = c + 1
                if leave == "continue after its own store":
                    if A[c] > 0:
                        S[(tx + c) % 256] = c + 3
                        continue
                S[(tx + c) % 256] = c + 3
                with T.ws(0):
                    y = y + c
                if leave == "continue":
                    if A[c] > 0:
                        continue
                x = x + tx * c
            O[tx] = x
            with T.ws(0):
                P[tx] = y

    x = np.arange(256) * (10 if leave == "at the end" else 6)
    y = np.full(128, 6 if leave == "continue after its own store" else 10, I32)
    agree(f, [A, np.zeros(256, I32), np.zeros(128, I32)], {1: x.astype(I32), 2: y})


@pytest.mark.parametrize("kind, own", [("if", 0), ("if", 1), ("elif", 1), ("for", 0), ("for", 1), ("while", 0), ("while", 1)])
def test_branches_and_bounds_around_roles(kind, own):
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            x = T.alloc_var("int32", init=0)
            S[tx] = 3
            if kind == "if":
                for _ in T.serial(3):
                    if S[5] == 3:
                        with T.ws(own):
                            S[(tx + 5) % 128] = 4
                        x = x + 1
            elif kind == "while":
                while S[5] == 3:
                    x = x + 1
                    with T.ws(own):
                        S[(tx + 5) % 128] = 4
            elif kind == "elif":
                if S[5] == 4:
                    x = 7
                elif S[6] == 3:
                    with T.ws(1):
                        S[(tx + 9) % 128] = S[tx] + 1
                    x = x + 1
            else:
                for _ in T.serial(S[5]):
                    with T.ws(own):
                        S[(tx + 5) % 128] = 4
                    x = x + 1
            O[tx] = x
            with T.ws(0):
                T.copy(S, P)

    agree(f, [np.zeros(256, I32), np.zeros(256, I32)],
          {0: np.full(256, 3 if kind == "for" else 1, I32), 1: np.repeat([4, 3], 128).astype(I32)})


def test_threads_add_to_what_others_have_not_asked_yet():
    """On the CPU a role that had asked added before the other asked: atomic updates waited for nobody."""
    @T.prim_func
    def f(O: T.Tensor((256,), "int32"), P: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            H = T.alloc_shared((4,), "int32")
            x = T.alloc_var("int32", init=1)
            T.clear(H)
            if H[3] > 5:
                x = 2
            T.atomic_add(H[3], 1)
            O[tx] = x
            with T.ws(0):
                T.copy(H, P)

    agree(f, [np.zeros(256, I32), np.zeros(4, I32)], {0: np.ones(256, I32), 1: np.array([0, 0, 0, 256], I32)})


@pytest.mark.parametrize("n", [0, 2])
def test_a_loop_that_may_go_no_round_orders_nothing(n):
    """The barrier in its body does not part what stands in front of the loop from what stands behind it."""
    @T.prim_func
    def f(N: T.Tensor((1,), "int32"), O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            R = T.alloc_shared((128,), "int32")
            x = T.alloc_var("int32", init=0)
            S[tx] = tx
            for r in T.serial(N[0]):
                R[tx] = tx + r
                x = x + R[127 - tx]
            O[tx] = x + S[(tx + 64) % 128]

    t = np.arange(128)
    want = (t + 64) % 128 + sum(127 - t + r for r in range(n))
    agree(f, [np.array([n], I32), np.zeros(128, I32)], {1: want.astype(I32)})


def test_what_is_read_before_a_continue_is_not_stored_over():
    @T.prim_func
    def f(A: T.Tensor((8,), "int32"), O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            x = T.alloc_var("int32", init=0)
            S[tx] = tx
            T.sync_threads()
            for r in T.serial(6):
                if A[r] > 0:
                    x = x + S[127 - tx]
                    continue
                x = x + r
            S[tx] = x
            O[tx] = S[127 - tx]

    t = np.arange(128)
    agree(f, [A, np.zeros(128, I32)], {1: (3 * t + 6).astype(I32)})


@pytest.mark.parametrize("own", [0, 1])
def test_a_condition_behind_a_role_finds_what_it_stored(own):
    @T.prim_func
    def f(O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            x = T.alloc_var("int32", init=1)
            for i in T.Parallel(128):
                S[i] = 0
            with T.ws(own):
                S[tx % 128] = 4
            if S[5] == 4:
                x = 2
            O[tx] = x

    agree(f, [np.zeros(256, I32)], {0: np.full(256, 2, I32)})
