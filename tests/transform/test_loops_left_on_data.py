"""The check of synchronisation follows loops that numbers read from tensors end, and branches that they decide, both ways."""

import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from tilelang.transform.verify_sync.values import Marked, number

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


def roles(loads, adds, loaded=None, scalar=False):
    """A role that loads tiles in turn and one that adds them up, each until its condition holds."""
    @T.prim_func
    def f(A: T.Tensor((8 * 64, 64), "float16"), N: T.Tensor((8,), "int32"), O: T.Tensor((64, 64), "float16"), n: T.int32):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((2, 64, 64), "float16")
            full, empty = T.alloc_barrier([128] * 2), T.alloc_barrier([128] * 2)
            with T.ws(1):
                for k in T.serial(8):
                    if loads(n if scalar else N, k):
                        break
                    T.mbarrier_wait_parity(empty[k % 2], (k // 2 + 1) % 2)
                    if loaded is None or loaded(N, k):
                        T.tma_copy(A[k * 64:k * 64 + 64, 0:64], S[k % 2, :, :], barrier=full[k % 2])
                        T.mbarrier_arrive(full[k % 2])
            with T.ws(0):
                F = T.alloc_fragment((64, 64), "float16")
                T.clear(F)
                for k in T.serial(8):
                    if adds(n if scalar else N, k):
                        break
                    T.mbarrier_wait_parity(full[k % 2], (k // 2) % 2)
                    for i, j in T.Parallel(64, 64):
                        F[i, j] += S[k % 2, i, j]
                    T.mbarrier_arrive(empty[k % 2])
                T.copy(F, O)

    return f


@pytest.mark.parametrize("loads, adds", [
    (lambda n, k: k >= n[0], lambda n, k: k >= n[0]), (lambda n, k: n[k] == 0, lambda n, k: n[k] == 0),
    (lambda n, k: n[k] < 0, lambda n, k: n[k] < 0),
])
def test_roles_that_end_at_the_same_number_are_ordered(loads, adds):
    (kernel,) = lower(roles(loads, adds).func, SM90A).kernels
    assert kernel.launch.plan.sync_report.startswith("ordered:")


@pytest.mark.parametrize("loads, adds, loaded", [
    (lambda n, k: k >= n[0], lambda n, k: k > n[0], None),  # the one that adds waits for a tile more
    (lambda n, k: n[k] == 0, lambda n, k: k < 0, None), (lambda n, k: n[k] == 0, lambda n, k: n[k] == 1, None),
    (lambda n, k: n[k] < 0, lambda n, k: n[T.min(k + 1, 7)] < 0, None),
    (lambda n, k: k < 0, lambda n, k: k < 0, lambda n, k: n[k] > 3),  # tiles that are left out and waited for
])
def test_roles_that_end_at_other_numbers_are_refused(loads, adds, loaded):
    """All ran with one choice of the numbers, in which no loop was left."""
    with pytest.raises(TileLangError, match="standstill.*where numbers read from tensors are") as e:
        lower(roles(loads, adds, loaded).func, SM90A)
    assert e.value.kind == "sync-unordered"


def test_loops_that_a_scalar_of_the_call_ends():
    lower(roles(lambda n, k: k >= n, lambda n, k: k >= n, scalar=True).func, SM90A)
    with pytest.raises(TileLangError, match="standstill") as e:
        lower(roles(lambda n, k: k >= n, lambda n, k: k >= n + 1, scalar=True).func, SM90A)
    assert e.value.kind == "sync-unordered"


def test_numbers_that_trials_take_tensors_to_hold():
    assert [number(2, (0, k)) for k in range(3)] == [2, 4, 6]
    assert [number(Marked(1, 5, 0), (9, k)) for k in range(3)] == [0, 5, 0]
    assert number(Marked(-1, 5, 7), (0,)) == 7
