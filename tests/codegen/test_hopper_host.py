"""The hand-built Hopper programs run on the host: coordinates, panels, descriptors, phases and the ring are right.

Copies land when somebody waits for them and products are computed when they are waited for, both as late as they may.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hopper_programs as hopper
from host_cuda import available, run_on_host

from tilelang.ir import Call, Evaluate, Func, Seq, dtype, numpy_dtype, rewrite, with_options

pytestmark = pytest.mark.skipif(not available(), reason="g++ and a CPU with F16C are needed")


def run(func: Func, values, folder) -> None:
    run_on_host(hopper.kernel_of(func), values, tuple(int(g) for g in func.body.grid), folder)


@pytest.mark.parametrize("out", ["tma", "plain"])
@pytest.mark.parametrize("dt, columns, width", [("float16", 128, 128), ("float32", 16, 64), ("int8", 64, 32),
                                                ("float16", 8, 16)])
def test_copy(dt, columns, width, out, tmp_path):
    m, n = 72, 144
    a = (np.arange(m * n) % 251 - 125).astype(numpy_dtype(dtype(dt))).reshape(m, n)
    b = np.zeros_like(a)
    run(hopper.copy(m, n, 64, columns, dt, width, out), {"A": a, "B": b}, tmp_path)
    assert np.array_equal(a, b)


def operands(m, n, k, trans_b, dt="float16"):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, s).astype(numpy_dtype(dtype(dt))) for s in ((m, k), (n, k) if trans_b else (k, n)))
    return {"A": a, "B": b, "C": np.full((m, n), 99, numpy_dtype(dtype(dt)))}


def expected(values, trans_b):
    a, b = values["A"].astype(np.float64), values["B"].astype(np.float64)
    return a @ (b.T if trans_b else b)


@pytest.mark.parametrize("m, n, k, trans_b, acc", [(128, 128, 448, True, "float32"), (128, 128, 448, False, "float32"),
                                                   (72, 136, 40, True, "float32"), (136, 72, 72, False, "float32"),
                                                   (64, 64, 64, True, "float16")])
def test_gemm(m, n, k, trans_b, acc, tmp_path):
    values = operands(m, n, k, trans_b)
    run(hopper.gemm(m, n, k, trans_b=trans_b, acc=acc), values, tmp_path)
    assert np.array_equal(values["C"].astype(np.float64), expected(values, trans_b))


def without(func: Func, op: str, first: bool = False, **attrs) -> Func:
    """The program with the calls of an operation removed."""
    def drop(x):
        if isinstance(x, Evaluate) and x.call.op == op and all(getattr(x.call.options, k) == v for k, v in attrs.items()):
            return Seq(())
        return None

    return rewrite(func, drop)


def changed(func: Func, op: str, **options) -> Func:
    """The program with options of an operation's calls changed."""
    def fix(x):
        if isinstance(x, Call) and x.op == op:
            return with_options(x, **options)
        return None

    return rewrite(func, fix)


@pytest.mark.parametrize("fault", ["wait_two", "no_wait", "no_final_wait", "wrong_sbo"])
def test_faults_are_found(fault, tmp_path):
    """What the host run can tell apart: it would be no test if these passed."""
    func = hopper.gemm(128, 128, 448)
    broken = {"wait_two": lambda: changed(func, "wgmma_wait", n=2), "no_wait": lambda: without(func, "wgmma_wait"),
              "no_final_wait": lambda: without(func, "wgmma_wait", n=0),
              "wrong_sbo": lambda: changed(func, "wgmma_descriptor", sbo=512)}[fault]()
    values = operands(128, 128, 448, True)
    try:
        run(broken, values, tmp_path)
    except RuntimeError as e:
        assert "pending" in str(e)
        return
    assert not np.array_equal(values["C"].astype(np.float64), expected(values, True))
