"""Barriers around steps that a variable counts: T.alloc_var of one value in all threads, in loops and branches."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, run

import tilelang.language as T
from tilelang.errors import TileLangError

N = 12


def by_threads(count):
    """LU in place, a row a thread: rows below the step change, the row of the step is read."""
    @T.prim_func
    def f(A: T.Tensor((N, N), "float32"), B: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((N, N), "float32")
            T.copy(A, S)
            t = T.get_thread_binding()
            k = T.alloc_var("int32", init=0)
            if count == "while":
                while k < N:
                    if t > k and t < N:
                        S[t, k] = S[t, k] / S[k, k]
                        for j in T.serial(k + 1, N):
                            S[t, j] = S[t, j] - S[t, k] * S[k, j]
                    k += 1
            else:
                for _ in T.serial(N):
                    for i in T.Parallel(N):
                        if i > k:
                            S[i, k] = S[i, k] / S[k, k]
                            for j in T.serial(N - k - 1):
                                S[i, j + k + 1] = S[i, j + k + 1] - S[i, k] * S[k, j + k + 1]
                    k += 1
            T.copy(S, B)

    return f


def factors(a):
    a = a.astype(np.float64)
    for k in range(N):
        a[k + 1:, k] /= a[k, k]
        a[k + 1:, k + 1:] -= np.outer(a[k + 1:, k], a[k, k + 1:])
    return a


@pytest.mark.spec("L15:automatic-sync", "T.alloc_var")
@pytest.mark.parametrize("count", ["while", "for"])
def test_a_factorisation_in_place(count):
    a = (np.random.default_rng(5).random((N, N)) + N * np.eye(N)).astype(np.float32)
    f = by_threads(count)
    for on in EXECUTIONS:
        np.testing.assert_allclose(run(f, a, on=on)[1], factors(a), rtol=1e-5, err_msg=on)
    assert "__syncthreads" in cuda_text(f)


def doubling(apart):
    """Prefix sums: element t takes element t - d.  apart: what is read and what is written are two buffers."""
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S, R = T.alloc_shared((64,), "int32"), T.alloc_shared((64,), "int32")
            t = T.get_thread_binding()
            d = T.alloc_var("int32", init=1)
            S[t] = A[t]
            while d < 64:
                if apart:
                    R[t] = S[t]
                    if t >= d:
                        S[t] = S[t] + R[t - d]
                elif t >= d:
                    S[t] = S[t] + S[t - d]
                d = d * 2
            B[t] = S[t]

    return f


@pytest.mark.spec("L15:automatic-sync")
def test_steps_that_race_are_refused_and_those_apart_are_ordered():
    a = np.arange(64, dtype=np.int32)
    for on in EXECUTIONS:
        assert np.array_equal(run(doubling(True), a, on=on)[1], np.cumsum(a)), on
    with pytest.raises(TileLangError, match="`S` is touched by two threads without a barrier") as e:
        cuda_text(doubling(False), assemble=False)
    assert e.value.kind == "sync-unordered"


def test_a_step_that_threads_count_apart_is_no_step_of_all():
    @T.prim_func
    def f(A: T.Tensor((N, N), "float32"), B: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((N, N), "float32")
            T.copy(A, S)
            t = T.get_thread_binding()
            k = T.alloc_var("int32", init=0)
            k = t % 3
            if t > k:
                for j in T.serial(k + 1, N):
                    S[t, j] = S[t, j] - S[t, k] * S[k, j]
            T.copy(S, B)

    with pytest.raises(TileLangError) as e:
        cuda_text(f, assemble=False)
    assert e.value.kind in ("sync-divergent", "sync-unordered")
