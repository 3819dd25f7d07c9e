"""Tile operations that only some threads reach are refused on the way to a GPU: they would be done in part."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator.device.run import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

A100 = Target({"kind": "cuda", "arch": "sm_80"})


def lowered(f):
    return lower(f.func, A100)


def copy_by_a_warp_group():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((64, 64), "float32")
            with T.ws(1):
                T.copy(A, S)
            T.copy(S, B)

    return main


def parallel_by_a_warp_group():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            with T.ws(0):
                for i, j in T.Parallel(64, 64):
                    B[i, j] = A[i, j]

    return main


def copy_by_some_threads():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((64, 64), "float32")
            if T.get_thread_binding() >= 100:
                T.copy(A, S)
            T.copy(S, B)

    return main


def parallel_by_some_threads():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            if T.get_thread_binding() < 60:
                for i in T.Parallel(64):
                    B[i] = A[i]

    return main


def gemm_under_a_bound_thread_index():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            T.copy(A, S)
            T.clear(F)
            part = T.get_thread_binding() // 30
            if part < 2:
                T.gemm(S, S, F)
            T.copy(F, C)

    return main


@pytest.mark.spec("M:barrier-in-branch")
@pytest.mark.parametrize("program", [copy_by_some_threads, parallel_by_some_threads, gemm_under_a_bound_thread_index])
def test_block_wide_work_under_a_thread_condition_is_refused(program):
    with pytest.raises(TileLangError, match="only some threads get here") as e:
        lowered(program())
    assert e.value.kind == "collective-divergent"
    assert "entered by some threads only" not in str(e.value).splitlines()[0] and "test_check_collective.py" in str(e.value)


def test_branches_that_all_threads_take_alike_hold_tile_operations():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), Use: T.Tensor((2,), "int32"), B: T.Tensor((2, 64), "float32")):
        with T.Kernel(2, threads=64) as bx:
            S = T.alloc_shared((64,), "float32")
            T.clear(S)
            if Use[bx] != 0:
                T.copy(A, S)
            for _k in T.serial(bx + 1):
                for i in T.Parallel(64):
                    S[i] = S[i] + 1.0
            T.copy(S, B[bx, 0:64])

    a = np.arange(64, dtype=np.float32)
    got = run_device(lowered(main), {"A": a, "Use": np.array([0, 1], np.int32),
                                     "B": np.zeros((2, 64), np.float32)}).outputs["B"]
    assert np.array_equal(got, np.stack([np.ones(64), a + 2]))


@pytest.mark.spec("T.ws", "L8:ws")
@pytest.mark.parametrize("program", [copy_by_a_warp_group, parallel_by_a_warp_group])
def test_block_wide_work_of_a_warp_group_is_done_by_its_threads(program):
    a = np.arange(4096, dtype=np.float32).reshape(64, 64)
    assert np.array_equal(run_device(lowered(program()), {"A": a, "B": np.zeros_like(a)}).outputs["B"], a)


def test_per_thread_code_of_a_warp_group_runs():
    @T.prim_func
    def main(B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            with T.ws(1):
                B[tx] = tx

    got = run_device(lowered(main), {"B": np.zeros(256, np.int32)}).outputs["B"]
    assert np.array_equal(got, np.where(np.arange(256) >= 128, np.arange(256), 0))


def test_a_loop_whose_end_is_beside_a_counter_of_its_threads():
    """What atomics change in shared memory is one value for all threads, as what stores change."""
    @T.prim_func
    def main(Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            n, k, tx = T.alloc_shared((2,), "int32"), T.alloc_var("int32", init=0), T.get_thread_binding()
            if tx == 0:
                n[0] = 5
                n[1] = 0
            T.sync_threads()
            while n[0] > 0:
                if tx + 1 < n[0]:
                    T.atomic_add(n[1], 1)
                T.sync_threads()
                if tx == 0:
                    n[0] = n[1]
                    n[1] = 0
                T.sync_threads()
                k += 1
            Y[tx] = k

    assert (run_device(lowered(main), {"Y": np.zeros(64, np.int32)}).outputs["Y"] == 5).all()


def stores_by_thread(form):
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            F = T.alloc_fragment((64,), "float32")
            T.copy(A, F)
            if form == "place":
                F[63 - t] = 1
            elif form == "value":
                F[3] = t
            elif form == "branch":
                if t % 2 == 0:
                    F[3] = 1
            else:
                F[3] = 1
            T.copy(F, B)

    return main


@pytest.mark.parametrize("form", ["place", "value", "branch"])
def test_what_threads_store_by_themselves_in_a_fragment_is_refused(form):
    """Each stored in a copy of its own, and one of them was written out."""
    with pytest.raises(TileLangError, match="threads store different things in `F`") as e:
        lowered(stores_by_thread(form))
    assert e.value.kind == "fragment-store"
    lowered(stores_by_thread("all alike"))
