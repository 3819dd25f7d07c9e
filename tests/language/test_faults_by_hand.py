"""Faults that users plant in programs for Hopper, each named: a wrong phase on either side, a byte count off by one, a stage
given back and an accumulator read before the wait.  Fences of the async proxy the compiler adds where they are left out."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import walk
from tilelang.ir.expr import Call
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
f16, f32 = "float16", "float32"


def by_hand(fault="", stages=2, k=256, bk=32):
    """A @ B.T of 64 x 64: warp group 1 loads, warp group 0 computes and stores by TMA."""

    @T.prim_func
    def main(A: T.Tensor((64, k), f16), B: T.Tensor((64, k), f16), C: T.Tensor((64, 64), f32)):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((stages, 64, bk), f16), T.alloc_shared((stages, 64, bk), f16)
            Cs, Cf = T.alloc_shared((64, 64), f32), T.alloc_fragment((64, 64), f32)
            full, empty = T.alloc_barrier([128] * stages), T.alloc_barrier([128] * stages)
            with T.ws(1):
                for s in T.serial(k // bk):
                    T.mbarrier_wait_parity(empty[s % stages], (s // stages + (fault != "phase of the producer")) % 2)
                    T.tma_copy(A[0:64, s * bk:(s + 1) * bk], As[s % stages, :, :], barrier=full[s % stages])
                    T.tma_copy(B[0:64, s * bk:(s + 1) * bk], Bs[s % stages, :, :], barrier=full[s % stages])
                    if fault == "bytes":
                        T.mbarrier_expect_tx(full[s % stages], 1)
                    T.mbarrier_arrive(full[s % stages])
            with T.ws(0):
                T.clear(Cf)
                for s in T.serial(k // bk):
                    T.mbarrier_wait_parity(full[s % stages], (s // stages + (fault == "phase of the consumer")) % 2)
                    for _ in T.serial(1):  # what a loop leaves in flight is the program's to wait for
                        T.wgmma_gemm(As[s % stages, :, :], Bs[s % stages, :, :], Cf, transpose_B=True)
                    if fault == "accumulator":
                        for i, j in T.Parallel(64, 64):
                            Cf[i, j] = Cf[i, j] * 2.0
                    if fault != "stage":
                        T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[s % stages])
                T.wait_wgmma(0)
                T.copy(Cf, Cs)
                if fault != "fence":
                    T.fence_proxy_async()
                T.sync_threads(3, 128)
                T.tma_copy(Cs, C)
                T.tma_store_wait(0)

    return main


def operands(k=256):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (64, k)).astype(np.float16) for _ in range(2))
    return [a, b, np.zeros((64, 64), np.float32)]


@pytest.mark.parametrize("fault, says, hint", [
    ("phase of the producer", "comes to a standstill", "compare the parities"),
    ("phase of the consumer", "may be in phase 1 before a wait", "one wait for each phase"),
    ("bytes", "bytes still expected", "announced bytes"), ("stage", "`As` is overwritten by a copy", "T.wait_wgmma"),
    ("accumulator", "`Cf` is used while the wgmma that writes it may still run", "T.wait_wgmma")])
def test_a_planted_fault_is_refused_by_name(fault, says, hint):
    """The hint was T.sync_threads, whatever the fault."""
    with pytest.raises(TileLangError, match=says) as e:
        lower(by_hand(fault).func, SM90A)
    assert e.value.kind == "sync-unordered" and hint in e.value.hint and "T.sync_threads" not in e.value.hint


@pytest.mark.parametrize("fault, kind", [("phase of the producer", "sim-barrier"), ("bytes", "sim-barrier"),
                                         ("phase of the consumer", "sim-uninitialized")])
def test_the_tile_meaning_finds_barriers_too(fault, kind):
    with pytest.raises(TileLangError) as e:
        run_tile(by_hand(fault), operands())
    assert e.value.kind == kind


@pytest.mark.parametrize("fault", ["", "fence"])
def test_a_fence_that_is_left_out_is_added(fault):
    low, args = lower(by_hand(fault).func, SM90A), operands()
    calls = [x.op for x in walk(low.kernels[0].launch) if isinstance(x, Call)]
    store = calls.index("tma_store")
    assert "fence_proxy_async" in calls[:store] and low.kernels[0].plan.sync_report.startswith("ordered")
    want = args[0].astype(np.float64) @ args[1].astype(np.float64).T
    assert np.array_equal(run_device(low, args).outputs["C"], want)


def test_faults_of_statements_that_the_compiler_made_are_told_at_a_line_of_the_user():
    """They were told at the call of tilelang.compile: what a TMA copy announces, and a store of a fragment, had no place."""
    @T.prim_func
    def announced_late(A: T.Tensor((64, 64), f16), C: T.Tensor((64, 64), f16)):
        with T.Kernel(1, threads=128):
            S, bar = T.alloc_shared((64, 64), f16), T.alloc_barrier(1)
            if T.get_thread_binding() == 0:
                T.mbarrier_arrive(bar)
            T.tma_copy(A[0:64, 0:64], S, barrier=bar)
            T.mbarrier_wait_parity(bar, 0)
            T.copy(S, C)

    @T.prim_func
    def not_awaited(A: T.Tensor((64, 64), f16), C: T.Tensor((64, 64), f32)):
        with T.Kernel(1, threads=128):
            S, F = T.alloc_shared((64, 64), f16), T.alloc_fragment((64, 64), f32)
            T.copy(A, S)
            for _ in T.serial(1):
                T.wgmma_gemm(S, S, F, transpose_B=True, clear_accum=True)
            T.copy(F, C)

    for f, text in ((announced_late, "T.tma_copy"), (not_awaited, "T.wgmma_gemm")):
        with pytest.raises(TileLangError) as caught:
            lower(f.func, SM90A)
        assert caught.value.kind == "sync-unordered" and f"^{'^' * len(text)}" in str(caught.value)
        assert text in str(caught.value).splitlines()[2]
