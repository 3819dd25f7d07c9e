"""Clusters that initialise mbarriers and meet in the orders of CUDA's own examples: verifier and simulator agree."""

import numpy as np
import pytest
from sync_mutants import arguments, is_faulty, lowered, mutants

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Launch, rewrite, walk
from tilelang.simulator import run_device
from tilelang.transform.verify_sync.launch import check_launch

SM90 = {"kind": "cuda", "arch": "sm_90a"}


def broadcast(order):
    """Two blocks get one tile by multicast; order: of the initialisation of their mbarriers."""
    @T.prim_func
    def f(A: T.Tensor((2, 64, 64), "float16"), B: T.Tensor((4, 64, 64), "float16")):
        with T.ClusterKernel(4, cluster_dims=2, threads=128) as bx:
            s, bar, tx = T.alloc_shared((64, 64), "float16"), T.create_barriers(1), T.get_thread_binding()
            if tx == 0:
                T.ptx_init_barrier_thread_count(bar[0], 1)
                if "one fences" in order:
                    T.ptx_fence_barrier_init()
                if "proxy" in order:
                    T.fence_proxy_async()
            if "sync" in order:
                T.sync_threads()
            if "all fence" in order:
                T.ptx_fence_barrier_init()
            if "relaxed" in order:
                T.cluster_arrive_relaxed()
            else:
                T.cluster_arrive()
            T.cluster_wait()
            T.tma_copy(A[bx // 2, :, :], s, barrier=bar[0], cluster_mask=3)
            if tx == 0:
                T.mbarrier_arrive(bar[0])
            T.mbarrier_wait_parity(bar[0], 0)
            T.copy(s, B[bx, :, :])
            T.cluster_arrive()
            T.cluster_wait()

    return f


def ring(by_warps=False, in_roles=True, stages=2, steps=5):
    """Rank 0 multicasts tiles to two blocks, whose consumers give each stage back to it."""
    arrivals = 4 if by_warps else 128

    @T.prim_func
    def f(A: T.Tensor((steps, 64, 64), "float16"), B: T.Tensor((4, steps, 64, 64), "float16")):
        with T.ClusterKernel(4, cluster_dims=2, threads=256) as bx:
            s, full = T.alloc_shared((stages, 64, 64), "float16"), T.create_barriers(stages)
            free, own = T.alloc_cluster_barrier([2 * arrivals] * stages), T.alloc_barrier([arrivals] * stages)
            tx, rank = T.get_thread_binding(), T.block_rank_in_cluster()
            if tx == 0:
                for i in T.serial(stages):
                    T.ptx_init_barrier_thread_count(full[i], 128)
            T.ptx_fence_barrier_init()
            T.cluster_arrive_relaxed()
            if not in_roles:
                T.cluster_wait()
            if tx < 128:
                if in_roles:
                    T.cluster_wait()
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(own[k % stages], (k // stages & 1) ^ 1)
                    if rank == 0:
                        T.mbarrier_wait_parity(free[k % stages], (k // stages & 1) ^ 1)
                    T.tma_copy(A[k, :, :], s[k % stages, :, :], barrier=full[k % stages], cluster_mask=3)
                    T.mbarrier_arrive(full[k % stages])
            else:
                if in_roles:
                    T.cluster_wait()
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(full[k % stages], k // stages & 1)
                    for i, j in T.Parallel(64, 64):
                        B[bx, k, i, j] = s[k % stages, i, j]
                    if by_warps:
                        T.sync_warp()
                    if not by_warps or tx % 32 == 0:
                        T.mbarrier_arrive(own[k % stages])
                        T.mbarrier_arrive(free[k % stages], 0)
            T.cluster_sync()

    return f


ORDERS = ["one fences, relaxed", "one fences, sync", "all fence, relaxed", "sync, all fence, relaxed", "proxy", "proxy, sync"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_fence_by_all_threads_did_not_count_for_the_one_that_initialised(order):
    """"copies signal bar[0] of block 0 without a fence_mbarrier_init after its initialisation"."""
    kernel = tilelang.compile(broadcast(order), target=SM90, execution_backend="simulator")
    assert kernel.sync_report().startswith("f_kernel: ordered")
    a, b = arguments(broadcast(order))
    kernel(a, b)
    np.testing.assert_array_equal(b, np.repeat(a, 2, 0))


@pytest.mark.parametrize("order", ["", "sync", "relaxed", "proxy, relaxed"])
def test_mbarriers_that_the_cluster_does_not_see_are_refused(order):
    with pytest.raises(TileLangError, match="initialisation") as e:
        tilelang.compile(broadcast(order), target=SM90)
    assert e.value.kind == "sync-unordered"
    func = lowered("sm_90a", broadcast(order), {})
    assert is_faulty(func, arguments(broadcast(order)), None)


@pytest.mark.parametrize("options", [{}, {"in_roles": False}, {"by_warps": True}], ids=str)
def test_rings_of_a_cluster(options):
    """Where one lane of a warp arrives, its other lanes had no proxy fence: "ordinary loads may still be under way"."""
    program = ring(**options)
    func, args = lowered("sm_90a", program, {}), arguments(program)
    (launch,) = walk(func.body, Launch)
    assert check_launch(launch)[0].startswith("ordered")
    np.testing.assert_array_equal(run_device(func, args).outputs["B"], np.repeat(args[0][None], 4, 0))


def test_faulty_mutants_of_a_ring_of_a_cluster_are_refuted():
    program = ring(by_warps=True, steps=3)
    func, args = lowered("sm_90a", program, {}), arguments(program)
    (launch,) = walk(func.body, Launch)
    want, found = run_device(func, args).outputs, 0
    for k, (mutation, s, other) in enumerate(mutants(launch)):
        if k % 2:
            continue
        mutant = rewrite(func, lambda n, s=s, other=other: other if n is s else None)
        (changed,) = walk(mutant.body, Launch)
        faulty, text = is_faulty(mutant, args, want), check_launch(changed)[0]
        assert not (faulty and text.startswith("ordered")), (mutation, s.span)
        found += faulty
    assert found > 5
