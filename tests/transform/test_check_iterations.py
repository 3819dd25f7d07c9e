"""What threads do as threads is refused in T.Parallel on every target; what an iteration does stays."""

import numpy as np
import pytest
from everywhere import everywhere

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import legalized

TARGETS = (None, Target({"kind": "cuda", "arch": "sm_80"}), Target({"kind": "cuda", "arch": "sm_90a"}))


def does(act, barrier=False):
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            b = T.alloc_barrier([32]) if barrier else None
            for i in T.Parallel(64):
                act(b[0] if barrier else A[i])
                O[i] = A[i]

    return f


ACTS = {
    "T.mbarrier_arrive": lambda b: T.mbarrier_arrive(b),
    "T.mbarrier_wait_parity": lambda b: T.mbarrier_wait_parity(b, 0),
    "T.mbarrier_expect_tx": lambda b: T.mbarrier_expect_tx(b, 4),
    "T.mbarrier_arrive_expect_tx": lambda b: T.mbarrier_arrive_expect_tx(b, 4),
    "T.ptx_init_barrier_thread_count": lambda b: T.ptx_init_barrier_thread_count(b, 1),
    "T.ptx_cp_async_barrier": lambda b: T.ptx_cp_async_barrier(b),
    "T.cluster_sync": lambda _: T.cluster_sync(),
    "T.cluster_arrive": lambda _: T.cluster_arrive(),
    "T.cluster_wait": lambda _: T.cluster_wait(),
    "T.sync_threads": lambda _: T.sync_threads(3, 32),
    "T.named_barrier_arrive": lambda _: T.named_barrier_arrive(3, 32),
    "T.sync_grid": lambda _: T.sync_grid(),
    "T.pdl_sync": lambda _: T.pdl_sync(),
    "T.pdl_trigger": lambda _: T.pdl_trigger(),
    "T.ptx_commit_group": lambda _: T.ptx_commit_group(),
    "T.ptx_wait_group": lambda _: T.ptx_wait_group(0),
    "T.tma_store_arrive": lambda _: T.tma_store_arrive(),
    "T.tma_store_wait": lambda _: T.tma_store_wait(),
    "T.ptx_fence_barrier_init": lambda _: T.ptx_fence_barrier_init(),
    "T.warpgroup_arrive": lambda _: T.warpgroup_arrive(),
    "T.warpgroup_commit_batch": lambda _: T.warpgroup_commit_batch(),
    "T.warpgroup_wait": lambda _: T.wait_wgmma(0),
    "T.set_max_nreg": lambda _: T.inc_max_nreg(240),
    "T.thread_return": lambda _: T.thread_return(),
}


@pytest.mark.parametrize("name", ACTS)
def test_acts_of_threads_in_a_parallel_loop_are_refused_everywhere(name):
    """Barriers other than the block's were met once an iteration by whoever ran it: tile, CPU and GPU differed."""
    f = does(ACTS[name], "barrier" in name and name not in ("T.named_barrier_arrive", "T.ptx_fence_barrier_init"))
    for target in TARGETS:
        if target is not None and target.arch == "sm_80" and name.split(".")[1].startswith(("mbar", "cluster", "tma", "warpg")):
            continue  # the target itself is refused first
        with pytest.raises(TileLangError, match="iterations of T.Parallel belong to none") as e:
            legalized(f.func, target)
        assert e.value.kind == "parallel-exchange" and name in str(e.value), (name, str(e.value))
        assert "test_check_iterations.py" in str(e.value)


def test_what_single_iterations_do_stays():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32"), N: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                T.atomic_add(N[0], A[i])
                O[i] = T.__ldg(A[i]) + 1
                T.device_assert(A[i] >= 0)

    a = np.arange(64, dtype=np.int32)
    assert everywhere(f, a)[2].tolist() == [a.sum()]
