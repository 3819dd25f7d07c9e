"""late_waits: GEMMs that run under the conversion of an operand of the next one."""

import ml_dtypes
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


@pytest.mark.parametrize("onto, want", [("other", [0, 0]), ("operand", [0, 0])])
def test_gemms_of_shared_tiles_run_under_a_conversion(onto, want):
    """Two GEMMs into one accumulator, and a tile that is converted behind them: one of its own, or their operand."""
    @T.prim_func
    def main(X: T.Tensor((M, K), "float16"), W: T.Tensor((N, K), "float16"), Z: T.Tensor((N, K), "float8_e4m3fn"),
             Y: T.Tensor((M, K), "float32")):
        with T.Kernel(1, threads=128):
            Xs, Ws, Zs = T.alloc_shared((M, K), "float16"), T.alloc_shared((N, K), "float16"), T.alloc_shared((N, K), Z.dtype)
            Vs = T.alloc_shared((N, K), "float16") if onto == "other" else Ws
            acc = T.alloc_fragment((M, K), "float32")
            T.clear(acc)
            for _ in T.serial(2):
                S, P = T.alloc_fragment((M, N), "float32"), T.alloc_fragment((M, N), "float16")
                T.copy(X, Xs)
                T.copy(W, Ws)
                T.copy(Z, Zs)
                T.gemm(Xs, Ws, S, transpose_B=True, clear_accum=True)
                T.gemm(Xs, Ws, S, transpose_B=True)
                T.copy(Zs, Vs)
                T.copy(S, P)
                T.gemm(P, Vs, acc)
            T.copy(acc, Y)

    lowered = lower(main.func, SM90A)
    text = print_kernel(lowered.kernels[0]).split("__global__")[1]
    assert waits(lowered) == want
    assert (text.index("tl::half_of_float8") < text.index("tl::wgmma_wait")) == (onto == "other")
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(-1, 2, x).astype(np.float16) for n, x in (("X", (M, K)), ("W", (N, K)))}
    arrays["Z"] = rng.integers(-1, 2, (N, K)).astype(ml_dtypes.float8_e4m3fn)
    got, expected = run_device(lowered, arrays).outputs, run_tile(main.func, arrays)
    np.testing.assert_array_equal(got["Y"], expected["Y"])
