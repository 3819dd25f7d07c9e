"""check_pipelines: order and stage lists that do not fit the loop are refused for every target, others change nothing."""

import numpy as np
import pytest
from pass_steps import around

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.simulator import run_tile


def added(order, stage):
    @T.prim_func
    def main(A: T.Tensor((4, 32), "float32"), B: T.Tensor((4, 32), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((32,), "float32")
            for k in T.Pipelined(4, order=order, stage=stage):
                T.copy(A[k, 0:32], s)
                for i in T.Parallel(32):
                    B[k, i] = s[i] + 1

    return main


def test_lists_that_fit_change_nothing():
    before, after = around(added([0, 1], [0, 1]), "check_pipelines")
    assert after is before
    a = np.arange(128, dtype=np.float32).reshape(4, 32)
    assert np.array_equal(run_tile(after, [a, np.zeros_like(a)])["B"], a + 1)


@pytest.mark.parametrize("target", ["cpu", {"kind": "cuda", "arch": "sm_80"}])
@pytest.mark.parametrize("order, stage, kind", [([0], [0], "pipeline-annotation"), ([1, 0], [0, 0], "pipeline-order"),
                                                ([0, 1], [1, 0], "pipeline-order")])
def test_lists_that_do_not_fit_are_refused(order, stage, kind, target):
    with pytest.raises(TileLangError) as e:
        tilelang.lower(added(order, stage), target=target)
    assert e.value.kind == kind
