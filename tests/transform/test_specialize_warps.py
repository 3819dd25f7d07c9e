"""specialize_warps: a pipelined loop becomes a warp group that loads and warp groups that compute."""

import sys
from pathlib import Path

import numpy as np
import pytest
from pass_steps import SM90A, around

import tilelang.language as T
from tilelang.ir import Call, For, Launch, walk
from tilelang.ops import Copy, Gemm
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import programs


def gemm(k, stages=2):
    return programs.gemm(128, 64, k, 64, 64, 64, tb=True, stages=stages)


def launch_of(func):
    (launch,) = walk(func.body, Launch)
    return launch


def test_loads_and_products_stand_in_loops_of_their_own():
    before, after = around(gemm(256), "specialize_warps", SM90A)
    assert launch_of(before).num_threads == 128 and launch_of(after).num_threads == 256  # one warp group more, that loads
    ops = [c.op for c in walk(after.body, Call)]
    assert {"in_warp_groups", "mbarrier_wait", "mbarrier_arrive"} <= set(ops) and "in_warp_groups" not in repr(before)
    both = [s for s in walk(before.body, For) if {type(x) for x in walk(s, Copy, Gemm)} == {Copy, Gemm}]
    assert len(both) == 1
    assert [s for s in walk(after.body, For) if {type(x) for x in walk(s, Copy, Gemm)} == {Copy, Gemm}] == []


@pytest.mark.parametrize("k", [64, 128, 320])
def test_both_programs_compute_the_product(k):
    before, after = around(gemm(k), "specialize_warps", SM90A)
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((128, k), (64, k)))
    args = [a, b, np.zeros(64, np.float32), np.zeros((128, 64), np.float16)]
    want = a.astype(np.float32) @ b.astype(np.float32).T
    for func in (before, after):
        assert np.array_equal(run_tile(func, args)["C"].astype(np.float32), want)
    lowered = lower(gemm(k).func, Target(SM90A))
    assert np.array_equal(run_device(lowered, args).outputs["C"].astype(np.float32), want)


def test_a_loop_of_one_stage_stays_where_it_may_not_get_more():
    before, after = around(gemm(256, stages=1), "specialize_warps", SM90A, {"tl.extra_stages": False})
    assert launch_of(after).num_threads == 128 and "in_warp_groups" not in repr(after)
    assert any("no warp specialisation" in line for line in launch_of(after).plan.report)


def test_products_that_all_lie_in_inner_loops():
    @T.prim_func
    def main(A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[:, k * 64:(k + 1) * 64], a)
                T.copy(B[k * 64:(k + 1) * 64, :], b)
                for n in T.unroll(2):
                    T.gemm(a[:, n * 32:(n + 1) * 32], b[n * 32:(n + 1) * 32, :], c)
            T.copy(c, C)

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((64, 256), (256, 64)))
    got = run_device(lower(main.func, Target(SM90A)), [a, b, np.zeros((64, 64), np.float16)]).outputs["C"]
    assert np.array_equal(got.astype(np.float32), a.astype(np.float32) @ b.astype(np.float32))


def split_in_cluster(meet=False, side=64, stages=3):
    """C = A B^T, k divided among the two blocks of a cluster, which add up their accumulators behind the loop: block r has row
    half r of the tile.  meet: the blocks meet before they end."""
    f16, f32 = "float16", "float32"

    half = side // 2

    @T.prim_func
    def f(A: T.Tensor((side, 512), f16), B: T.Tensor((side, 512), f16), C: T.Tensor((side, side), f32)):
        with T.ClusterKernel(2, cluster_dims=2, threads=2 * side) as rank:
            As, Bs = T.alloc_shared((side, 64), f16), T.alloc_shared((side, 64), f16)
            own, other = T.alloc_shared((side, side), f32), T.alloc_shared((half, side), f32)
            acc, there = T.alloc_fragment((side, side), f32), T.alloc_cluster_barrier([1])
            T.clear(acc)
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(A[0, rank * 256 + k * 64], As)
                T.copy(B[0, rank * 256 + k * 64], Bs)
                T.gemm(As, Bs, acc, transpose_B=True)
            if meet:
                T.cluster_sync()
            T.copy(acc, own)
            to = 1 - rank
            T.copy_cluster(own[to * half:to * half + half, :], other, dst_block=to, remote_barrier=there[0])
            if T.get_thread_binding() == 0:
                T.mbarrier_arrive_expect_tx(there[0], half * side * 4)
            T.mbarrier_wait_parity(there[0], 0)
            for i, j in T.Parallel(half, side):
                C[rank * half + i, j] = own[rank * half + i, j] + other[i, j]
            T.cluster_sync()

    return f


def test_blocks_of_a_program_s_own_cluster_have_warp_roles():
    """Its loop was loaded by cp.async, 512 bytes of A and B by each thread in turn, under no instruction of another warp."""
    lowered = lower(split_in_cluster().func, Target(SM90A))
    launch = lowered.kernels[0].launch
    assert launch.num_threads == 256 and launch.plan.cluster == (2, 1, 1)
    assert sum(c.op == "tma_load" for c in walk(launch.body, Call)) == 2
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (64, 512)).astype(np.float16) for _ in range(2))
    got = run_device(lowered, [a, b, np.full((64, 64), np.nan, np.float32)]).outputs["C"]
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32).T)


def test_blocks_that_meet_behind_the_loop_keep_their_threads():
    launch = lower(split_in_cluster(meet=True).func, Target(SM90A)).kernels[0].launch
    assert launch.num_threads == 128 and any("cluster_sync itself" in line for line in launch.plan.report)


def test_what_is_sent_to_another_block_lies_where_stages_were_and_what_arrives_does_not():
    launch = lower(split_in_cluster(side=128, stages=6).func, Target(SM90A)).kernels[0].launch
    places = {b.name: (at, at + b.size * b.dtype.bytes) for b, at in launch.plan.shared_offsets}
    assert launch.plan.shared_bytes < 232448 and places["As"][1] - places["As"][0] == 6 * 128 * 64 * 2

    def shares(x, y):
        return places[x][0] < places[y][1] and places[y][0] < places[x][1]

    assert shares("own", "As") or shares("own", "Bs")
    assert not any(shares("other", x) for x in places if x != "other")


def test_a_tile_that_the_loop_does_not_read_is_free_in_front_of_it():
    @T.prim_func
    def main(A: T.Tensor((320, 64), "float16"), B: T.Tensor((192, 64), "float16"), C: T.Tensor((320, 64), "float32")):
        with T.Kernel(5, threads=128) as n:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            own, c = T.alloc_fragment((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A[n * 64:(n + 1) * 64, :], a)
            T.copy(a, own)
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(B[k * 64:(k + 1) * 64, :], b)
                T.gemm(own, b, c)
            T.copy(c, C[n * 64:(n + 1) * 64, :])

    options = {"tl.persistent": 2}
    _, after = around(main, "specialize_warps", SM90A, options)
    code = repr(after)
    consumers = code[code.rindex("a_full"):]
    assert 0 <= consumers.find("mbarrier_arrive") < consumers.find("for k")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((320, 64), (192, 64)))
    got = run_device(lower(main.func, Target(SM90A), options), [a, b, np.zeros((320, 64), np.float32)]).outputs["C"]
    assert np.array_equal(got, a.astype(np.float32) @ b.reshape(3, 64, 64).astype(np.float32).sum(0))
