"""join_loads: neighbouring loads of bytes in unrolled loops."""

import ml_dtypes
import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
STEPS, N = 3, 64


def permuted(order):
    """Y = the sum of X[k, :, order] W^T with X of float8 as an operand in registers."""
    @T.prim_func
    def main(X: T.Tensor((STEPS, N, N), "float8_e4m3fn"), W: T.Tensor((N, N), "float16"), Y: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            Xs, Ws = T.alloc_shared((N, N), "float8_e4m3fn"), T.alloc_shared((N, N), "float16")
            K, acc = T.alloc_fragment((N, N), "float16"), T.alloc_fragment((N, N), "float32")
            T.copy(W, Ws)
            T.clear(acc)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(X[k, :, :], Xs)
                for i, j in T.Parallel(N, N):
                    K[i, j] = T.cast(Xs[i, order(j)], "float16")
                T.gemm(K, Ws, acc, transpose_B=True)
            T.copy(acc, Y)

    return main


def fours(j):
    return j // 16 * 16 + j % 8 // 2 * 4 + j // 8 % 2 * 2 + j % 2


@pytest.mark.parametrize("order, bytes_", [(fours, 4), (lambda j: j, 2), (lambda j: j ^ 1, 1)],
                         ids=["fours", "in order", "swapped"])
def test_neighbouring_bytes_are_loaded_together(order, bytes_):
    lowered = lower(permuted(order).func, SM90A, {"tl.disable_warp_specialized": True})
    text = print_kernel(lowered.kernels[0])
    assert [n for n in (2, 4, 8) if f"tl::copy<fp8_e4_t, {n}>(" in text] == [bytes_] * (bytes_ > 1)
    rng = np.random.default_rng(1)
    X, W = rng.integers(-8, 9, (STEPS, N, N)).astype(ml_dtypes.float8_e4m3fn), rng.integers(-4, 5, (N, N)).astype(np.float16)
    Y = run_device(lowered, {"X": X, "W": W}).outputs["Y"]
    assert np.array_equal(Y, X.astype(np.float32).sum(0)[:, [order(j) for j in range(N)]] @ W.astype(np.float32).T)
