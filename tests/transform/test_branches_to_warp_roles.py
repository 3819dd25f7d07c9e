"""branches_to_warp_roles: branches of whole warp groups become roles, one behind the other."""

import sys
from pathlib import Path

import numpy as np
import pytest
from pass_steps import SM90A, around

import tilelang.language as T
from tilelang.ir import Call, If, walk
from tilelang.simulator import run_tile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import WITH_HOPPER, everywhere


def chain(first=128):
    @T.prim_func
    def main(A: T.Tensor((128,), "int32"), O: T.Tensor((3, 128), "int32")):
        with T.Kernel(1, threads=384):
            t = T.get_thread_binding()
            if t < first:
                for i in T.Parallel(128):
                    O[0, i] = A[i] + 1
            elif t < 256:
                for i in T.Parallel(128):
                    O[1, i] = A[i] + 2
            else:
                for i in T.Parallel(128):
                    O[2, i] = A[i] + 3

    return main


def roles(func):
    return [(c.options.first, c.options.count) for c in walk(func.body, Call) if c.op == "in_warp_groups"]


def test_a_chain_becomes_three_roles():
    before, after = around(chain(), "branches_to_warp_roles", SM90A)
    assert roles(before) == [] and roles(after) == [(0, 1), (1, 1), (2, 1)]
    assert all(x.orelse is None for x in walk(after.body, If))
    a = np.arange(128, dtype=np.int32)
    want = a + np.array([[1], [2], [3]])
    assert np.array_equal(run_tile(after, [a, np.zeros((3, 128), np.int32)])["O"], want)
    assert np.array_equal(everywhere(chain(), a, on=WITH_HOPPER)[1], want)


def test_branches_inside_a_warp_group_stay():
    @T.prim_func
    def main(O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            if t < 100:
                O[t] = t
            else:
                O[t] = -t

    before, after = around(main, "branches_to_warp_roles", SM90A)
    assert after is before
    want = np.where(np.arange(256) < 100, np.arange(256), -np.arange(256))
    assert np.array_equal(everywhere(main, on=WITH_HOPPER)[0], want)


def by_number(loop):
    """Each warp has an iteration, with shared memory and registers of its own."""
    @T.prim_func
    def main(A: T.Tensor((4, 64), "int32"), O: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=128):
            mine = T.get_thread_binding() // 32
            s = T.alloc_shared((4, 64), "int32")
            for w in loop(4):
                if mine == w:
                    f = T.alloc_fragment((64,), "int32")
                    T.copy(A[w, :], f)
                    for i in T.Parallel(64):
                        s[w, i] = f[i] * (w + 1)
                    for i in T.Parallel(64):
                        O[w, i] = s[w, 63 - i]

    return main


@pytest.mark.parametrize("loop", [T.unroll, T.serial], ids=lambda f: f.__name__)
def test_a_loop_that_compares_warps_was_not_unrolled(loop):
    """It was rejected: "T.Parallel takes all threads of the block, and only some threads get here"."""
    _, after = around(by_number(loop), "branches_to_warp_roles", SM90A)
    assert roles(after) == [(w, 1) for w in range(4)]
    a = np.arange(256, dtype=np.int32).reshape(4, 64)
    want = a[:, ::-1] * np.arange(1, 5)[:, None]
    assert np.array_equal(everywhere(by_number(loop), a, on=WITH_HOPPER)[1], want)


def test_loops_in_which_all_warps_do_tile_operations_stay():
    @T.prim_func
    def main(A: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=128):
            t = T.get_thread_binding()
            for w in T.unroll(4):
                for i in T.Parallel(64):
                    A[w, i] = A[w, i] + w
                if t == w:
                    A[w, 0] = 1

    before, after = around(main, "branches_to_warp_roles", SM90A)
    assert after is before
