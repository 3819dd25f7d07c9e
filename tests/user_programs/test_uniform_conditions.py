"""Conditions that all threads share through memory of their own, and sums under conditions beside fragments."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

ROWS = np.array([[0, -1, 2, -1], [-1, 3, -1, -1], [4, 5, 6, 7]], np.int32)
F = np.arange(64, dtype=np.float32)


def expanded(scope):
    """Each row of a list of positions is copied to a private array, and the tile to every position that is one."""
    @T.prim_func
    def main(P: T.Tensor((3, 4), "int32"), X: T.Tensor((64,), "float32"), O: T.Tensor((8, 64), "float32")):
        with T.Kernel(3, threads=64) as b:
            pos = T.alloc_local((4,), "int32") if scope == "local" else T.alloc_fragment((4,), "int32")
            f = T.alloc_fragment((64,), "float32")
            T.copy(X, f)
            T.copy(P[b, 0], pos)
            for k in T.serial(4):
                if pos[k] >= 0:
                    for i in T.Parallel(64):
                        O[pos[k], i] = f[i]

    return main


@pytest.mark.parametrize("scope", ["local", "fragment"])
def test_a_private_array_copied_from_a_row_is_the_same_in_all_threads(scope):
    want = np.zeros((8, 64), np.float32)
    want[ROWS[ROWS >= 0]] = F
    program = expanded(scope)
    assert np.array_equal(everywhere(program, ROWS, F, on=WITH_HOPPER)[2], want)
    for arch in ("sm_80", "sm_90a"):
        cuda_text(program, arch)


def counted():
    """The number of positions and the last one in private memory, from assignments under conditions all threads share."""
    @T.prim_func
    def main(P: T.Tensor((3, 4), "int32"), X: T.Tensor((64,), "float32"), O: T.Tensor((8, 64), "float32")):
        with T.Kernel(3, threads=64) as b:
            n = T.alloc_var("int32")
            n = 0
            s, last = T.alloc_shared((64,), "float32"), T.alloc_local((2,), "int32")
            T.fill(last, -1)
            for k in T.serial(4):
                if P[b, k] >= 0:
                    n = n + 1
            for k in T.serial(4):
                last[k % 2] = P[b, k]
                if last[k % 2] >= 0:
                    T.copy(X, s)
                    if n > 1:
                        for i in T.Parallel(64):
                            O[last[k % 2], i] = s[63 - i] + n

    return main


def test_private_numbers_assigned_alike_decide_for_all_threads():
    want = np.zeros((8, 64), np.float32)
    for row in ROWS:
        own = row[row >= 0]
        if len(own) > 1:
            want[own] = F[::-1] + len(own)
    assert np.array_equal(everywhere(counted(), ROWS, F, on=WITH_HOPPER)[2], want)


def test_a_private_array_copied_by_thread_number_is_refused():
    @T.prim_func
    def main(P: T.Tensor((64, 4), "int32"), O: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            pos = T.alloc_local((4,), "int32")
            T.copy(P[T.get_thread_binding(), 0], pos)
            if pos[0] >= 0:
                for i in T.Parallel(64):
                    O[i] = 1.0

    with pytest.raises(TileLangError) as e:
        tilelang.compile(main, target=WITH_HOPPER["sm_90a"][0])
    assert e.value.kind == "collective-divergent"


def guarded_sum(shape, dims):
    """A reducer that takes what a fragment has just got, under one condition."""
    @T.prim_func
    def main(X: T.Tensor(shape, "float32"), n: T.int32, O: T.Tensor((dims,), "float32"), G: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=128):
            r = T.alloc_reducer(dims, "float32", replication="all")
            T.fill(r, 0)
            fr = T.alloc_fragment(shape, "float32")
            for i, j in T.Parallel(*shape):
                if i < n:
                    fr[i, j] = X[i, j] * 2.0
                    r[j % dims] += fr[i, j]
            T.finalize_reducer(r)
            T.copy(r, O)
            for i, j in T.Parallel(*shape):
                if i < n:
                    G[i, j] = fr[i, j]

    return main


@pytest.mark.filterwarnings("ignore:T.alloc_reducer")
@pytest.mark.parametrize("n", [0, 10, 64])
@pytest.mark.parametrize("shape, dims", [((64, 4), 1), ((64, 8), 4), ((64, 8), 8)])
def test_a_guarded_sum_of_what_the_iteration_stored_in_a_fragment(shape, dims, n):
    x = np.random.default_rng(n).integers(-4, 5, shape).astype(np.float32)
    kept = 2 * np.where(np.arange(shape[0])[:, None] < n, x, 0)
    got = everywhere(guarded_sum(shape, dims), x, n, on=WITH_HOPPER)
    assert np.array_equal(got[-2], kept.reshape(-1, dims).sum(0)) and np.array_equal(got[-1], kept)
