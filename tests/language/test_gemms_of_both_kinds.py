"""T.wgmma_gemm and T.gemm into one accumulator: the product asked for by name lays it out, the others follow."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
Policy = T.GemmWarpPolicy


def program(m=64, k2=64, dt="float16", threads=128, by_name=Policy.Square, plain=Policy.Square, in_registers=False,
            first=False, wait=True):
    n, k, second = 64, 64, dt

    @T.macro
    def multiply(A2s, B2s, F):
        if in_registers:
            A2f = T.alloc_fragment((m, k2), second)
            T.copy(A2s, A2f)
            T.gemm(A2f, B2s, F, policy=plain)
        else:
            T.gemm(A2s, B2s, F, policy=plain)

    @T.prim_func
    def f(A: T.Tensor((2 * m, k), "float16"), B: T.Tensor((2 * k, n), "float16"), A2: T.Tensor((m, k2), second),
          B2: T.Tensor((k2, n), second), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            As, Bs = T.alloc_shared((2, m, k), "float16"), T.alloc_shared((2, k, n), "float16")
            A2s, B2s = T.alloc_shared((m, k2), second), T.alloc_shared((k2, n), second)
            F = T.alloc_fragment((m, n), "float32")
            T.copy(A2, A2s)
            T.copy(B2, B2s)
            for s in T.unroll(2):
                T.copy(A[s * m:(s + 1) * m, 0:k], As[s, :, :])
                T.copy(B[s * k:(s + 1) * k, 0:n], Bs[s, :, :])
            T.clear(F)
            if first:
                multiply(A2s, B2s, F)
            for s in T.serial(2):
                T.wgmma_gemm(As[s, :, :], Bs[s, :, :], F, policy=by_name)
            if wait:
                T.wait_wgmma(0)
            if not first:
                multiply(A2s, B2s, F)
            T.wait_wgmma(0)
            T.copy(F, C)

    return f


CASES = {
    "same": {}, "shorter": {"k2": 24}, "odd": {"k2": 7}, "under_way": {"k2": 24, "wait": False},
    "before": {"k2": 8, "first": True},
    "under_way_same": {"wait": False}, "other_type": {"k2": 32, "dt": "float32"},
    "registers": {"k2": 24, "in_registers": True}, "two_rows_a_warp": {"m": 128, "k2": 24, "in_registers": True},
    "columns_by_name": {"m": 128, "threads": 256, "by_name": Policy.FullCol}, "columns": {"m": 128, "threads": 256,
                                                                                       "plain": Policy.FullCol},
    "columns_and_short": {"m": 128, "threads": 256, "k2": 8, "by_name": Policy.FullCol}}


@pytest.mark.spec("L11:wgmma_gemm", "T.wgmma_gemm")
@pytest.mark.parametrize("name,off", [*((n, False) for n in CASES), ("same", True), ("under_way_same", True)])
def test_one_accumulator(name, off):
    """off: T.gemm alone goes by mma.sync."""
    options = CASES[name]
    m, k2, dt = options.get("m", 64), options.get("k2", 64), options.get("dt", "float16")
    f = program(**options)
    rng = np.random.default_rng(3)
    a, b, a2, b2 = (rng.integers(-2, 3, s).astype(t) for s, t in (((2 * m, 64), "float16"), ((128, 64), "float16"),
                                                                 ((m, k2), dt), ((k2, 64), dt)))
    want = sum(x.astype(float) @ y.astype(float) for x, y in ((a[:m], b[:64]), (a[m:], b[64:]), (a2, b2)))
    config = {"tl.disable_wgmma": True} if off else {}
    lowered = lower(f.func, SM90A, config)
    c = np.zeros((m, 64), np.float32)
    assert np.array_equal(run_device(lowered, [a, b, a2, b2, c]).outputs["C"], want)
    assert np.array_equal(run_tile(f.func, [a, b, a2, b2, c])["C"], want)
    text = print_kernel(lowered.kernels[0])
    body = text[text.rindex("__global__"):]
    assert "wgmma_m64n" in body  # what was asked for by name
    assert ("::mma_m16n8" in body) == (off or "k2" in options)  # 16-bit products that fit go the same way
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(text, "sm_90a")
        assert "C75" not in cubin.log and cubin.spills == 0, cubin.log
