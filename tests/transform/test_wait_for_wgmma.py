"""wait_for_wgmma: results of T.wgmma_gemm that are used before any wait."""

import numpy as np
import pytest
from pass_steps import SM90A

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Call, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower


def backward(first_wait=None):
    """Two products in flight; the first is used, then the second, then both as operands: a step of attention's gradient."""
    @T.prim_func
    def main(K: T.Tensor((64, 64), "float16"), Q: T.Tensor((2, 64, 64), "float16"), D: T.Tensor((2, 64, 64), "float16"),
             dV: T.Tensor((64, 64), "float32"), dK: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            k = T.alloc_shared((64, 64), "float16")
            q, d = T.alloc_shared((2, 64, 64), "float16"), T.alloc_shared((2, 64, 64), "float16")
            s, ds = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            p, dp = T.alloc_fragment((64, 64), "float16"), T.alloc_fragment((64, 64), "float16")
            dv, dk = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(K, k)
            T.copy(Q, q)
            T.copy(D, d)
            T.clear(dv)
            T.clear(dk)
            for i in T.serial(2):
                T.wgmma_gemm(k, q[i, :, :], s, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(k, d[i, :, :], ds, transpose_B=True, clear_accum=True)
                if first_wait is not None:
                    T.wait_wgmma(first_wait)
                for a, b in T.Parallel(64, 64):
                    s[a, b] = s[a, b] * 2.0
                T.copy(s, p)
                T.wgmma_gemm(p, d[i, :, :], dv)
                for a, b in T.Parallel(64, 64):
                    dp[a, b] = s[a, b] + ds[a, b]
                T.wgmma_gemm(dp, q[i, :, :], dk)
                T.wait_wgmma(0)
            T.copy(dv, dV)
            T.copy(dk, dK)

    return main


def inputs():
    rng = np.random.default_rng(0)
    return [rng.integers(-1, 2, s).astype(np.float16) for s in ((64, 64), (2, 64, 64), (2, 64, 64))]


def test_results_are_waited_for_where_they_are_used():
    args = inputs()
    k, q, d = (x.astype(np.float32) for x in args)
    s, ds = 2 * (k @ q.transpose(0, 2, 1)), k @ d.transpose(0, 2, 1)
    want = {"dV": (s @ d).sum(0), "dK": ((s + ds) @ q).sum(0)}
    full = [*args, *(np.zeros((64, 64), np.float32) for _ in range(2))]
    lowered = lower(backward().func, Target(SM90A))
    for got in (run_device(lowered, full).outputs, run_tile(backward().func, full)):
        for name, w in want.items():
            assert np.array_equal(got[name], w)
    waits = [c.options.n for c in walk(lowered.host.body, Call) if c.op == "wgmma_wait"]
    assert waits == [1, 1, 0]  # for the first product, for the second beside the third, and the program's own
    assert tilelang.compile(backward(), target=SM90A).sync_report().startswith("main_kernel: ordered")


def test_waits_of_the_program_stay_alone():
    lowered = lower(backward(0).func, Target(SM90A))
    assert [c.options.n for c in walk(lowered.host.body, Call) if c.op == "wgmma_wait"] == [0, 0]


def test_a_result_that_a_branch_left_in_flight_is_refused_with_the_line():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), n: T.int32, C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, acc = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.clear(acc)
            if n > 0:
                T.wgmma_gemm(a, a, acc)
            T.copy(acc, C)

    with pytest.raises(TileLangError, match="`acc` is used while the wgmma") as e:
        tilelang.compile(main, target=SM90A)
    assert f"put T.wait_wgmma(0) after line {e.value.span.line}, before the use" in str(e.value)
