"""Views whose length only the kernel knows: no tensor map can be made for them."""

import numpy as np
import pytest
from hopper_lowered import launch_of, lowered, ops, report

import tilelang.language as T
from tilelang.simulator import run_device


def rows_of(loads):
    """C = A A^T of the first Rows[0] rows: a view ends what is stored, or what is loaded."""
    @T.prim_func
    def main(A: T.Tensor((128, 64), "float16"), Rows: T.Tensor((1,), "int32"), C: T.Tensor((128, 128), "float16")):
        with T.Kernel(1, threads=128):
            As, Cf = T.alloc_shared((128, 64), "float16"), T.alloc_fragment((128, 128), "float32")
            n = Rows[0]
            if loads:
                T.copy(T.make_tensor(T.address_of(A[0, 0]), (n, 64), "float16")[0:128, :], As)
            else:
                T.copy(A, As)
            T.gemm(As, As, Cf, transpose_B=True, clear_accum=True)
            if loads:
                T.copy(Cf, C)
            else:
                T.copy(Cf, T.make_tensor(T.address_of(C[0, 0]), (n, 128), "float16")[0:128, :])

    return main


@pytest.mark.parametrize("loads, op", [(False, "tma_store"), (True, "tma_load")])
def test_a_view_of_a_length_read_by_the_kernel_had_a_tensor_map_made_on_the_host(loads, op):
    launch = launch_of(rows_of(loads))
    assert op not in ops(launch) and "is known in the kernel only" in report(launch)
    a = np.random.default_rng(0).integers(-2, 3, (128, 64)).astype(np.float16)
    got = run_device(lowered(rows_of(loads)), {"A": a, "Rows": np.array([77], np.int32),
                                               "C": np.full((128, 128), -9, np.float16)}).outputs["C"]
    inside = np.arange(128) < 77
    want = a.astype(np.float64) @ a.astype(np.float64).T
    if loads:
        assert np.array_equal(got, want * inside[:, None] * inside)
    else:
        assert np.array_equal(got[:77], want[:77]) and np.all(got[77:] == -9)
