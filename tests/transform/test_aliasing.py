"""keep_order: where tensors may overlap, loops of a launch keep the order of the program."""

import numpy as np
from pass_steps import around

import tilelang.language as T
from tilelang.ir import For, Launch, walk
from tilelang.simulator import run_tile


def shifted(n=4):
    """Each step reads what the step before wrote, where B is A shifted by a row."""
    @T.prim_func
    def main(A: T.Tensor((n, 32), "float32"), B: T.Tensor((n, 32), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((32,), "float32")
            for k in T.Pipelined(n, num_stages=2):
                T.copy(A[k, 0:32], s)
                for i in T.Parallel(32):
                    B[k, i] = s[i] + 1

    return main


def loops(func):
    return [s.kind for s in walk(func.body, For)]


def test_a_loop_whose_tensors_may_overlap_is_serial():
    before, after = around(shifted(), "keep_order", config={"tirx.noalias": False})
    assert loops(before) == ["pipelined"] and loops(after) == ["serial"]
    (launch,) = walk(after.body, Launch)
    assert {b.name for b in launch.plan.overlapping} == {"A", "B"}
    memory = np.zeros((5, 32), np.float32)
    for func in (before, after):
        got = run_tile(func, [memory[:4].copy(), np.zeros((4, 32), np.float32)])
        assert np.array_equal(got["B"], np.ones((4, 32)))
    shared = memory.copy()
    got = run_tile(after, [shared[:4], shared[1:]], aliased=True)
    assert got["B"][:, 0].tolist() == [1, 2, 3, 4]  # each row from the one before


def test_tensors_that_do_not_alias_stay_pipelined():
    before, after = around(shifted(), "keep_order")
    assert after is before and loops(after) == ["pipelined"]
