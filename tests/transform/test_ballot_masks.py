"""ballot_masks: a vote in a branch names the lanes that come to it."""

import sys
from pathlib import Path

import numpy as np
from pass_steps import around

import tilelang.language as T
from tilelang.ir import Call, walk

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import everywhere


def votes(branch):
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int64")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            if branch:
                if A[i] % 3 == 0:
                    O[i] = T.cast(T.ballot(A[i] % 2 == 0), "int64")
            else:
                O[i] = T.cast(T.ballot(A[i] % 2 == 0), "int64")

    return main


def ops(func):
    return [c.op for c in walk(func.body, Call) if c.op.startswith("ballot")]


def test_a_vote_in_a_branch_gets_the_mask_of_the_branch():
    before, after = around(votes(True), "ballot_masks")
    assert ops(before) == ["ballot"] and ops(after) == ["ballot_sync", "ballot_sync"]  # who comes, then what they say
    a = np.arange(64, dtype=np.int32) * 7 % 31
    want = np.zeros(64, np.int64)
    for i in range(64):
        warp = a[i // 32 * 32:i // 32 * 32 + 32]
        want[i] = sum(1 << k for k in range(32) if warp[k] % 3 == 0 and warp[k] % 2 == 0) if a[i] % 3 == 0 else 0
    assert np.array_equal(everywhere(votes(True), a)[1], want)


def test_a_vote_of_all_lanes_stays():
    before, after = around(votes(False), "ballot_masks")
    assert after is before
