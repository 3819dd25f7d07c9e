"""order_warp_roles: what all threads of the block wait for does not stand in a warp group of its own."""

import numpy as np
import pytest
from pass_steps import SM90A, around

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator import run_tile


def counted(inside):
    @T.prim_func
    def main(A: T.Tensor((256,), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            if inside:
                with T.ws(0):
                    O[t] = T.syncthreads_count(A[t] > 0)
            else:
                n = T.syncthreads_count(A[t] > 0)
                with T.ws(0):
                    O[t] = n

    return main


def test_a_vote_of_the_block_in_front_of_a_role_stays():
    before, after = around(counted(False), "order_warp_roles", SM90A)
    assert after is before
    a = np.arange(256, dtype=np.int32) % 4
    assert np.array_equal(run_tile(after, [a, np.zeros(256, np.int32)])["O"], np.where(np.arange(256) < 128, 192, 0))


@pytest.mark.parametrize("target", ["cpu", SM90A])
def test_a_vote_of_the_block_in_a_role_is_refused(target):
    with pytest.raises(TileLangError) as e:
        tilelang.lower(counted(True), target=target)
    assert e.value.kind == "collective-divergent" and "syncthreads_count" in str(e.value)
