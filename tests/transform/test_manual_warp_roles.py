"""lower_manual_warp_roles: barriers that a program allocates are initialised in front of everything else."""

import numpy as np
from pass_steps import SM90A, around

import tilelang
import tilelang.language as T
from tilelang.ir import Alloc, Call, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower


@T.prim_func
def handed_over(A: T.Tensor((4, 128), "int32"), O: T.Tensor((4, 128), "int32")):
    with T.Kernel(1, threads=256):
        s = T.alloc_shared((128,), "int32")
        full, empty = T.alloc_barrier(128), T.alloc_barrier(128)
        with T.ws(1):
            for k in T.serial(4):
                T.mbarrier_wait_parity(empty, k % 2 ^ 1)
                for i in T.Parallel(128):
                    s[i] = A[k, i] * 2
                T.mbarrier_arrive(full)
        with T.ws(0):
            for k in T.serial(4):
                T.mbarrier_wait_parity(full, k % 2)
                for i in T.Parallel(128):
                    O[k, i] = s[i] + 1
                T.mbarrier_arrive(empty)


def calls(func):
    return [c.op for c in walk(func.body, Call)]


def test_barriers_are_initialised_first():
    before, after = around(handed_over, "lower_manual_warp_roles", SM90A)
    assert "mbarrier_init" not in calls(before)
    ops = calls(after)
    assert ops.count("mbarrier_init") == 2 and ops.index("mbarrier_init") < ops.index("fence_mbarrier_init")
    assert ops.index("fence_mbarrier_init") < ops.index("sync_threads") < ops.index("in_warp_groups")
    first = [x.buffer.scope_name for x in walk(after.body, Alloc)][:2]
    assert first == ["shared.barrier", "shared.barrier"]
    a = np.arange(512, dtype=np.int32).reshape(4, 128)
    zeros = np.zeros((4, 128), np.int32)
    assert np.array_equal(run_tile(before, [a, zeros])["O"], 2 * a + 1)
    lowered = lower(handed_over.func, Target(SM90A))
    assert np.array_equal(run_device(lowered, [a, zeros]).outputs["O"], 2 * a + 1)


def test_a_program_without_barriers_stays():
    @T.prim_func
    def main(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(128):
                B[i] = A[i]

    before, after = around(main, "lower_manual_warp_roles", SM90A)
    assert after is before
    assert tilelang.lower(main, target=SM90A).kernel_source
