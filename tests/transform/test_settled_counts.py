"""Loops whose bounds are read from global memory that the same launch wrote: before a barrier of all blocks, or not."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, run

import tilelang
import tilelang.language as T
from tilelang import errors

SIM = {"kind": "cuda", "arch": "sm_80"}
N, BLOCKS = 40, 2


def counted(barrier, again=False):
    """Each block sums, through shared memory, the values of one bin; the blocks counted and sorted them first."""
    @T.prim_func
    def main(ids: T.Tensor((N,), "int32"), X: T.Tensor((N,), "int32"), count: T.Tensor((BLOCKS,), "int32"),
             place: T.Tensor((BLOCKS, N), "int32"), O: T.Tensor((BLOCKS, 8), "int32")):
        with T.Kernel(BLOCKS, threads=32) as bx:
            for i in T.Parallel(N // BLOCKS):
                e = bx * (N // BLOCKS) + i
                place[ids[e], T.atomic_add(count[ids[e]], 1, return_prev=True)] = e
            if barrier:
                T.sync_grid()
            S = T.alloc_shared((8,), "int32")
            total = T.alloc_fragment((8,), "int32")
            T.clear(total)
            n = count[bx]
            for k in T.serial(T.ceildiv(n, 8)):
                for i in T.Parallel(8):
                    S[i] = T.if_then_else(k * 8 + i < n, X[place[bx, k * 8 + i]], 0)
                for i in T.Parallel(8):
                    for j in T.serial(8):
                        total[i] += S[j]
            if again:
                T.atomic_add(count[1 - bx], 1)
            T.copy(total, O[bx, :])
    return main


def test_a_count_behind_a_barrier_of_all_blocks_bounds_a_loop_with_barriers():
    rng = np.random.default_rng(1)
    ids, x = rng.integers(0, BLOCKS, N).astype(np.int32), rng.integers(-9, 9, N).astype(np.int32)
    for on in EXECUTIONS:  # slots come in any order: not `everywhere`
        _, _, count, _, sums = run(counted(True), ids, x, on=on)
        np.testing.assert_array_equal(count, np.bincount(ids, minlength=BLOCKS), on)
        np.testing.assert_array_equal(sums[:, 0], [x[ids == b].sum() for b in range(BLOCKS)], on)


@pytest.mark.parametrize("program", [counted(False), counted(True, again=True)])
def test_a_count_that_other_blocks_may_still_change_bounds_none(program):
    with pytest.raises(errors.TileLangError, match="a loop that not all threads run alike"):
        tilelang.compile(program, target=SIM, execution_backend="simulator")
