"""A whole pipelined GEMM on the device simulator: the product, no bank conflicts, planted faults, its speed."""

import time

import numpy as np
import pytest
from device_gemm import device_gemm

from tilelang.errors import TileLangError
from tilelang.simulator import run_device

rng = np.random.default_rng(2)
M, N, K = 128, 64, 128
A, B = rng.integers(-4, 5, (M, K)).astype(np.float16), rng.integers(-4, 5, (K, N)).astype(np.float16)
C = np.zeros((M, N), np.float32)
SMALL = {"bm": 64, "bn": 64, "bk": 32}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_product(stages):
    report = run_device(device_gemm(M, N, K, stages=stages, **SMALL), [A, B, C])
    assert np.array_equal(report.outputs["C"], A.astype(np.float32) @ B.astype(np.float32))
    assert report.conflicts == 0
    assert report.instructions["mma mma.m16n8k16.f16.f16.f32"] == M * N * K // (16 * 8 * 16)
    assert report.bytes["st.shared.async"] == (M // 64) * (N // 64) * K * 128 * 2


def test_rows_without_swizzle_conflict():
    report = run_device(device_gemm(M, N, K, swizzle=False, **SMALL), [A, B, C])
    assert np.array_equal(report.outputs["C"], A.astype(np.float32) @ B.astype(np.float32))
    by_name = {(b.site.name, b.site.text): b for b in report.bank_conflicts}
    assert by_name["SA", "read"].conflicts == 3 * by_name["SA", "read"].ideal  # 64-byte rows: 4 of 8 rows on one bank
    assert by_name["SB", "read"].conflicts == 7 * by_name["SB", "read"].ideal  # 128-byte rows: all 8


@pytest.mark.parametrize("fault, kind", [
    ({"barrier": "pass"}, "sim-race"),
    ({"slot": "t + 1"}, "sim-async"),
    ({"slot": "t + 2", "stages": 3}, "sim-async"),
    ({"pending": 2}, "sim-async"),
    ({"clear": False}, "sim-uninitialized"),
    ({"extent": 1}, "sim-out-of-bounds"),
])
def test_planted_fault_is_found(fault, kind):
    with pytest.raises(TileLangError) as e:
        run_device(device_gemm(M, N, K, **{**SMALL, **fault}), [A, B, C])
    assert e.value.kind == kind, str(e.value)
    assert e.value.hint


def test_a_step_of_a_128x128x32_block_takes_well_under_a_second():
    f = device_gemm(128, 128, 128)
    a, b = rng.standard_normal((2, 128, 128)).astype(np.float16)
    start = time.process_time()
    run_device(f, [a, b, np.zeros((128, 128), np.float32)])
    assert (time.process_time() - start) / 4 < 0.3  # measured 0.015 s a step
