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
