"""The hand-built Hopper programs of tests/codegen (what the passes are to come to) on the device simulator."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "codegen"))
from hopper_programs import copy, gemm

from tilelang.ir import numpy_dtype
from tilelang.simulator import run_device

rng = np.random.default_rng(7)


@pytest.mark.parametrize("options", [{}, {"out": "plain"}, {"width": 64, "columns": 64}, {"width": 32, "columns": 32}])
def test_tma_copy(options):
    a = rng.standard_normal((100, 200)).astype(np.float16)
    assert np.array_equal(run_device(copy(100, 200, **options), [a, np.zeros_like(a)]).outputs["B"], a)


@pytest.mark.parametrize("dt, trans_b, acc, out", [
    ("float16", True, "float32", "float16"), ("float16", False, "float32", "float16"),
    ("bfloat16", True, "float32", "bfloat16"), ("float16", True, "float16", "float16"),
    ("float8_e4m3", True, "float32", "float16"),
])
def test_gemm_of_producer_and_consumers(dt, trans_b, acc, out):
    m, n, k = 200, 136, 576
    a, b = (rng.integers(-3, 4, s).astype(numpy_dtype(dt)) for s in ((m, k), (n, k)))
    f = gemm(m, n, k, dt, trans_b, acc, out)
    args = [a, b if trans_b else np.ascontiguousarray(b.T), np.zeros((m, n), numpy_dtype(out))]
    report = run_device(f, args)
    want = (a.astype(np.float32) @ b.astype(np.float32).T).astype(numpy_dtype(out))
    assert np.array_equal(report.outputs["C"].astype(np.float32), want.astype(np.float32))
    assert report.conflicts == 0
