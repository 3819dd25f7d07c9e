"""A left operand of eight rows in shared memory that T.wgmma_gemm repeats for all rows of the accumulator."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


def product(rows, m, k, call="wgmma_gemm"):
    @T.prim_func
    def main(A: T.Tensor((2, rows, k), "float16"), B: T.Tensor((32, k), "float16"), C: T.Tensor((m, 32), "float32")):
        with T.Kernel(1, threads=m // 64 * 128):
            As, Bs = T.alloc_shared((2, rows, k), "float16"), T.alloc_shared((32, k), "float16")
            acc = T.alloc_fragment((m, 32), "float32")
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(acc)
            T.fence_proxy_async()
            T.sync_threads()
            for s in T.serial(2):
                if call == "wgmma_gemm":
                    T.wgmma_gemm(As[s, :, :], Bs, acc, transpose_B=True)
                    T.wait_wgmma(0)
                else:
                    T.gemm(As[s, :, :], Bs, acc, transpose_B=True)
            T.copy(acc, C)

    return main


@pytest.mark.parametrize("m, k", [(64, 64), (128, 32), (64, 256)])
def test_eight_rows_stand_for_all(m, k):
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((2, 8, k), (32, k)))
    program = product(8, m, k)
    lowered = lower(program.func, SM90A)
    assert "wgmma_descriptor<0, 0, " in print_kernel(lowered.kernels[0])
    want = np.tile(a.astype("f").sum(0) @ b.T.astype("f"), (m // 8, 1))
    for out in (run_tile(program, [a, b, np.zeros((m, 32), "f")]), run_device(lowered, [a, b, np.zeros((m, 32), "f")]).outputs):
        assert (out["C"] == want).all()


@pytest.mark.parametrize("rows, call", [(16, "wgmma_gemm"), (8, "gemm")])
def test_other_numbers_of_rows_and_other_gemms_are_errors(rows, call):
    with pytest.raises(TileLangError, match="M shape check failed") as e:
        product(rows, 64, 64, call)
    assert e.value.kind == "gemm-shape"
