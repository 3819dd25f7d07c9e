"""late_waits: GEMMs with operands in registers that run under the conversion of the next one."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
M, N, K, PIECE = 64, 64, 128, 32


def product(held, touched=False, stored=False):
    """Y = X W^T by pieces of X, of which `held` fragments hold one each. touched: each piece reads the accumulator; stored:
    each piece writes shared memory."""
    @T.macro
    def taken(Xs, x, n, acc):
        for i, j in T.Parallel(M, PIECE):
            x[i, j] = Xs[i, n * PIECE + j] * 2.0
        if acc is not None:
            for i, j in T.Parallel(M, N):
                acc[i, j] *= 0.5

    def pieces(Xs, Ws, left, acc, marks):
        for n in range(K // PIECE):
            x = left[n % held]
            taken(Xs, x, n, acc if touched else None)
            if stored:
                T.copy(x, marks)
            T.gemm(x, Ws[:, n * PIECE:(n + 1) * PIECE], acc, transpose_B=True)

    @T.prim_func
    def main(X: T.Tensor((M, K), "float16"), W: T.Tensor((N, K), "float16"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128):
            Xs, Ws = T.alloc_shared((M, K), "float16"), T.alloc_shared((N, K), "float16")
            marks = T.alloc_shared((M, PIECE), "float16")
            left = [T.alloc_fragment((M, PIECE), "float16") for _ in range(held)]
            acc = T.alloc_fragment((M, N), "float32")
            T.copy(X, Xs)
            T.copy(W, Ws)
            T.clear(acc)
            pieces(Xs, Ws, left, acc, marks)
            T.copy(acc, Y)

    return main


def waits(lowered):
    """How many groups of wgmma may be in flight behind each wait for them."""
    return [int(x[0]) for x in print_kernel(lowered.kernels[0]).split("__global__")[1].split("tl::wgmma_wait<")[1:]]


@pytest.mark.parametrize("held, touched, stored, want", [
    (2, False, False, [1, 1, 0]), (1, False, False, [0] * 4), (2, True, False, [0] * 4), (2, False, True, [0] * 4)],
    ids=["two fragments", "one", "a use of the accumulator", "a store to shared memory"])
def test_gemms_are_waited_for_where_their_registers_are_used(held, touched, stored, want):
    program = product(held, touched, stored)
    lowered = lower(program.func, SM90A)
    assert waits(lowered) == want
    rng = np.random.default_rng(0)
    arrays = {"X": rng.integers(-2, 3, (M, K)).astype(np.float16), "W": rng.integers(-2, 3, (N, K)).astype(np.float16)}
    got, expected = run_device(lowered, arrays).outputs, run_tile(program.func, arrays)
    np.testing.assert_array_equal(got["Y"], expected["Y"])
