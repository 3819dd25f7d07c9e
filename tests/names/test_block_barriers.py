"""Barriers and votes of a block, of its warp groups, of clusters and of the grid: one meaning on every execution."""

import numpy as np
import pytest
from everywhere import SM90A, WITH_HOPPER, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower

ALL = np.arange(256, dtype=np.int32)


@pytest.mark.spec("T.syncthreads_count", "T.syncthreads_or", "T.syncthreads_and", "T.ws")
def test_the_block_votes_beside_warp_groups_of_their_own():
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            with T.ws(0):
                T.copy(A[0:128], S[0:128])
            with T.ws(1):
                T.copy(A[128:256], S[128:256])
            n = T.syncthreads_count(S[255 - t] > 100)  # what the other group has written
            O[t] = n + S[255 - t]
            if T.syncthreads_or(A[t] > 254) != 0:
                O[t] = O[t] + 1000
            for k in range(2):
                O[t] = O[t] + T.syncthreads_and(A[t] >= k) * 5

    want = 155 + ALL[::-1] + 1000 + 5
    assert np.array_equal(everywhere(f, ALL, on=WITH_HOPPER)[1], want)


@pytest.mark.spec("T.syncthreads_count", "T.thread_return", "T.ws")
def test_the_block_votes_when_threads_of_both_groups_have_returned():
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            with T.ws(1):
                T.copy(A[0:128], S)
            O[t] = S[t % 128]
            if t % 2 == 1:
                T.thread_return()
            O[t] = O[t] + 1000 * T.syncthreads_count(A[t] > 200)
            if T.syncthreads_and(A[t] % 2 == 0) == 1:
                O[t] = O[t] + 100000

    want = ALL % 128 + np.where(ALL % 2 == 0, 27 * 1000 + 100000, 0)
    assert np.array_equal(everywhere(f, ALL, on=WITH_HOPPER)[1], want)


@pytest.mark.spec("T.syncthreads_and", "T.sync_grid", "T.ws")
@pytest.mark.parametrize("on", list(WITH_HOPPER))
@pytest.mark.parametrize("what", ["vote", "grid"])
def test_one_warp_group_asks_no_vote_of_the_block_and_meets_no_grid(what, on):
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            with T.ws(0):
                if what == "vote":
                    O[t] = T.syncthreads_and(A[t] < 200)
                else:
                    O[t] = 1
                    T.sync_grid()

    with pytest.raises(TileLangError, match="only some warps get here") as e:  # order_warp_roles
        run(f, ALL, on=on)
    assert e.value.kind == "collective-divergent"


def at_barrier_1(threads, count):
    @T.prim_func
    def f(A: T.Tensor((threads,), "int32"), O: T.Tensor((threads,), "int32")):
        with T.Kernel(1, threads=threads):
            t = T.get_thread_binding()
            S = T.alloc_shared((threads,), "int32")
            S[t] = A[t]
            T.sync_threads(1, count)
            O[t] = S[threads - 1 - t]

    return f


@pytest.mark.spec("T.sync_threads")
@pytest.mark.parametrize("threads, count", [(40, 64), (40, None), (96, 96)])
def test_a_warp_counts_as_32_threads_at_a_named_barrier(threads, count):
    a = ALL[:threads]
    assert np.array_equal(everywhere(at_barrier_1(threads, count), a)[1], a[::-1])


@pytest.mark.spec("T.sync_threads")
@pytest.mark.parametrize("on", ["tile", "simulator", "cpu"])
@pytest.mark.parametrize("threads, count", [(64, 32), (40, 32), (64, 96)])
def test_a_named_barrier_for_another_number_of_threads_is_refused(threads, count, on):
    with pytest.raises((TileLangError, RuntimeError)) as e:
        run(at_barrier_1(threads, count), ALL[:threads], on=on, simulated=True)
    assert "arrive" in str(e.value) or "wait" in str(e.value), str(e.value)


@pytest.mark.spec("T.sync_threads", "T.named_barrier_arrive")
def test_threads_part_and_meet_at_named_barriers():
    @T.prim_func
    def f(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            S = T.alloc_shared((256,), "int32")
            with T.ws(0):
                S[t] = A[t]
                T.sync_threads(3, 256)
                O[t] = S[255 - t]
            with T.ws(1):
                S[t] = A[t] + 1
                T.sync_threads(3, 256)
                O[t] = S[255 - t]

    want = np.where(ALL < 128, 256 - ALL, 255 - ALL)
    assert np.array_equal(everywhere(f, ALL, on=WITH_HOPPER)[1], want)


@pytest.mark.spec("T.sync_grid", "T.cluster_sync", "T.block_rank_in_cluster", "T.ClusterKernel", "L7:ClusterKernel")
def test_clusters_whose_blocks_meet_all_blocks_of_the_grid():
    @T.prim_func
    def f(A: T.Tensor((4, 4), "int32"), O: T.Tensor((4, 4), "int32")):
        with T.ClusterKernel(4, 4, cluster_dims=(2, 2), threads=32) as (bx, by):
            t = T.get_thread_binding()
            S = T.alloc_shared((32,), "int32")
            R = T.alloc_shared((32,), "int32")
            r = T.block_rank_in_cluster()
            S[t] = bx * 10 + by
            T.cluster_sync()
            T.copy_cluster(S, R, dst_block=3 - r)
            T.cluster_sync()
            if t == 0:
                A[bx, by] = R[5] + 1
            for _ in range(2):
                T.cluster_sync()
                T.sync_grid()
            if t == 0:
                O[bx, by] = A[3 - bx, 3 - by] * 10 + r

    x, y = np.indices((4, 4))
    X, Y = 3 - x, 3 - y
    there = (X ^ 1) * 10 + (Y ^ 1)  # the block across the cluster
    want = (there + 1) * 10 + x % 2 + y % 2 * 2
    assert np.array_equal(everywhere(f, np.zeros((4, 4), np.int32), on=("tile", "cpu", "sm_90a"))[1], want)
    (kernel,) = lower(f.func, Target(SM90A), {}).kernels
    assert kernel.launch.plan.cooperative and kernel.launch.plan.cluster == (2, 2, 1)


@pytest.mark.spec("T.shfl_xor", "T.any_sync", "T.syncthreads_count", "T.sync_threads", "L8:Parallel")
@pytest.mark.parametrize("on", ["tile", "simulator", "cpu"])
@pytest.mark.parametrize("act", ["shuffle", "vote", "count", "sum", "barrier"])
def test_iterations_of_a_parallel_loop_tell_each_other_nothing(act, on):
    """Which of them a warp runs together is not fixed: two layouts gave two results (check_iterations)."""
    @T.prim_func
    def f(A: T.Tensor((128,), "int32"), O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(128):
                if act == "shuffle":
                    O[i] = T.shfl_xor(A[i], 1)
                elif act == "vote":
                    O[i] = T.any_sync(A[i] == 3)
                elif act == "count":
                    O[i] = T.syncthreads_count(A[i] < 5)
                elif act == "sum":
                    O[i] = T.warp_reduce_sum(A[i])
                else:
                    O[i] = A[i]
                    T.sync_threads()

    with pytest.raises(TileLangError) as e:
        run(f, ALL[:128], on=on)
    assert e.value.kind == "parallel-exchange"
