"""check_hopper: T.ws is a test of thread numbers where no tile operation needs it, and what a target lacks is refused."""

import numpy as np
import pytest
from pass_steps import SM80, SM90A, around

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Call, walk
from tilelang.simulator import run_tile


@T.prim_func
def plain(O: T.Tensor((256,), "int32")):
    with T.Kernel(1, threads=256):
        t = T.get_thread_binding()
        with T.ws(1):
            O[t] = t + 1
        T.pdl_sync()


def ops(func):
    return {c.op for c in walk(func.body, Call)}


def test_warp_groups_are_thread_numbers_on_older_devices():
    before, after = around(plain, "check_hopper", SM80)
    assert {"in_warp_groups", "pdl_sync"} <= ops(before) and not {"in_warp_groups", "pdl_sync"} & ops(after)
    want = np.where(np.arange(256) >= 128, np.arange(256) + 1, 0)
    for func in (before, after):
        assert np.array_equal(run_tile(func, [np.zeros(256, np.int32)])["O"], want)


def test_they_stay_on_hopper():
    before, after = around(plain, "check_hopper", SM90A)
    assert after is before and "in_warp_groups" in ops(after)


def test_barriers_of_hopper_are_refused_on_older_devices():
    @T.prim_func
    def main(O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            bar = T.alloc_barrier(128)
            T.mbarrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)
            O[T.get_thread_binding()] = 1

    with pytest.raises(TileLangError) as e:
        tilelang.lower(main, target=SM80)
    assert e.value.kind == "needs-arch" and "sm_80" in str(e.value)
    assert tilelang.lower(main, target=SM90A).kernel_source
