"""Conditions that all threads of a block meet, and values that are one for all, are no work of single threads."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import If, walk
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower
from tilelang.transform.legalize.fold_thread_count import fold_thread_count

A64 = np.arange(64, dtype=np.int32) * 3 + 1


def branches(f):
    return [x for x in walk(fold_thread_count(f.func, PassContext())) if isinstance(x, If)]


def stored_under(holds):
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            F = T.alloc_fragment((4,), "int32")
            T.clear(F)
            if holds(tx):
                F[3] = A[5]
            else:
                F[2] = 7
            T.copy(F, O)

    return f


@pytest.mark.parametrize("holds, want", [
    (lambda tx: tx < 64, [0, 0, 0, 16]), (lambda tx: tx >= 0, [0, 0, 0, 16]), (lambda tx: tx // 64 == 0, [0, 0, 0, 16]),
    (lambda tx: tx > 63, [0, 0, 7, 0]), (lambda tx: T.get_lane_idx() < 32, [0, 0, 0, 16]),
    (lambda tx: T.get_thread_binding(1) == 0, [0, 0, 0, 16]),
])
def test_stores_in_fragments_under_conditions_that_all_threads_meet(holds, want):
    """They were refused as stores of single threads."""
    f = stored_under(holds)
    assert branches(f) == []
    assert everywhere(f, A64, on=("tile", "simulator"))[1].tolist() == want


def test_stores_in_fragments_under_other_conditions_stay_refused():
    f = stored_under(lambda tx: tx < 63)
    assert len(branches(f)) == 1
    with pytest.raises(TileLangError) as e:
        lower(f.func, Target({"kind": "cuda", "arch": "sm_80"}))
    assert e.value.kind == "fragment-store"


def test_block_wide_work_under_conditions_that_all_threads_meet():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((2, 64), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            warp = tx // 32
            S = T.alloc_shared((64,), "int32")
            if warp == 0 and tx < 32:
                T.copy(A[warp:warp + 64], S)
            for i in T.Parallel(64 + warp):
                O[0, i] = S[i] + warp
            if tx >= 32:
                T.copy(S, O[1, 0:64])

    assert branches(f) == []
    assert everywhere(f, A64, on=WITH_HOPPER)[1].tolist() == [A64.tolist(), [0] * 64]


def test_numbers_of_threads_in_a_warp_group_of_its_own():
    """tx // 128 is one value in a group, and was refused there as one of threads."""
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            with T.ws(1):
                for i in T.Parallel(128):
                    O[i + tx // 128 * 128] = A[i + 128] + T.get_warp_group_idx()
                if tx >= 128:
                    for i in T.Parallel(128):
                        O[i] = A[i]

    a = np.arange(256, dtype=np.int32)
    assert np.array_equal(everywhere(f, a, on=WITH_HOPPER)[1], a + (a >= 128))


def test_conditions_on_memory_are_not_settled():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            S = T.alloc_shared((64,), "int32")
            S[tx] = A[tx]
            if S[tx] > 40 and tx < 32:
                S[tx] = 0
                if S[tx] > 40:
                    O[tx] = 1
            for k in T.serial(2):
                if tx + 32 * k < 32:
                    O[tx + 32] = k + 5

    assert len(branches(f)) == 3
    assert everywhere(f, A64)[1].tolist() == [0] * 32 + [5] * 32
