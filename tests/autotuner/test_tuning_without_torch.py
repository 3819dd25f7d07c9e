"""Tuning with NumPy alone, what it says, and searches that are not repeated."""

import io
import logging
import sys
import time

import ml_dtypes
import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.autotuner import AutoTuner, set_autotune_inputs, tuner
from tilelang.env import env
from tilelang.jit import compiling
from tilelang.log import logger


@pytest.fixture(autouse=True)
def fresh(tmp_path):
    with env.using(TILELANG_CACHE_DIR=str(tmp_path)):
        yield


@pytest.fixture
def searches(monkeypatch):
    """What was searched for."""
    found, search = [], tuner._best
    monkeypatch.setattr(tuner, "_best", lambda *args: found.append(args[-1]) or search(*args))
    return found


@pytest.fixture
def lines(caplog):
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="tilelang"):
        yield caplog
    logger.removeHandler(caplog.handler)


def scaled(configs, dtype="float32", **options):
    @tilelang.autotune(configs=configs, warmup=1, rep=2, **options)
    @tilelang.jit(target="cpu", out_idx=[1])
    def scale(n, blk=16, by=2.0):
        @T.prim_func
        def main(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
            with T.Kernel(T.ceildiv(n, blk), threads=32) as bx:
                for i in T.Parallel(blk):
                    B[bx * blk + i] = A[bx * blk + i] * T.cast(by, dtype)

        return main

    return scale


@tilelang.autotune(configs=[{"b": 8}, {"b": 16}], warmup=1, rep=2)
@tilelang.jit(target="cpu")
def product(A, B, b: int = 8, by: float = 1.0):
    M, N = T.const("M N")
    A: T.Tensor((M, N), "float32")
    B: T.Tensor((M, N), "float32")
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(M, b), threads=32) as bx:
        for i, j in T.Parallel(b, N):
            C[bx * b + i, j] = A[bx * b + i, j] * B[bx * b + i, j] * by
    return C


def test_a_tensor_and_its_sizes_were_searched_for_twice(searches):
    a = np.ones((32, 16), np.float32)
    assert (product(a, a) == 1).all()
    kernel = product.compile(M=32, N=16)
    assert product.compile(a, B=a) is kernel and product.compile(a, a, by=1.0) is kernel and searches == ["product"]
    assert product.compile(a, a, by=2.0) is not kernel and product.compile(M=16, N=16) is not kernel
    assert len(searches) == 3
    scale = scaled([{"blk": 8}, {"blk": 16}])
    assert scale(64) is scale(n=64) is scale(64, by=2.0) is scale.compile(64) and len(searches) == 4
    scale(64, by=3.0)
    assert len(searches) == 5


def test_what_other_arguments_decide_is_searched_for_again(searches):
    """Of the first configuration the argument changes nothing."""
    @tilelang.autotune(configs=[{"b": 8}, {"b": 16}], warmup=1, rep=1)
    @tilelang.jit(target="cpu", out_idx=[1])
    def scale(n, wide, b=8):
        by = 3.0 if wide and b == 16 else 2.0

        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(T.ceildiv(n, b), threads=32) as bx:
                for i in T.Parallel(b):
                    B[bx * b + i] = A[bx * b + i] * by

        return main

    scale(64, False), scale(64, True)
    assert len(searches) == 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("with_torch", [True, False])
def test_every_configuration_was_skipped_with_numpy_and_a_reference(monkeypatch, dtype, with_torch):
    if not with_torch:
        monkeypatch.setitem(sys.modules, "torch", None)
    scale = scaled([{"blk": 8}, {"blk": 16}, {"blk": 16, "by": 3.0}], dtype, ref_prog=lambda a: a * 2)
    with set_autotune_inputs(np.arange(64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)):
        kernel = scale(64)
    assert kernel.config in ({"blk": 8}, {"blk": 16}) and kernel.ref_latency > 0


def test_without_torch_inputs_are_made_of_numpy_arrays(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    seen = []
    scale = scaled([{"blk": 8}, {"blk": 16, "by": 3.0}], ref_prog=lambda a: seen.append(type(a)) or a * 2)
    assert scale(64).config == {"blk": 8} and set(seen) == {np.ndarray}
    kernel = scale(64)
    kernel.get_profiler().assert_allclose(lambda a: a * 2)
    with pytest.raises(AssertionError, match="Too many mismatched elements: .* the first at"):
        kernel.get_profiler().assert_allclose(lambda a: a * 3)
    with pytest.raises(AssertionError, match=r"shape differs: tilelang has \(64,\), reference has \(32,\)"):
        kernel.get_profiler().assert_allclose(lambda a: a[:32])
    kernel.get_profiler().assert_consistent(2)


def test_the_reference_runs_once_for_equal_inputs():
    calls = []
    scaled([{"blk": b} for b in (4, 8, 16)], ref_prog=lambda a: calls.append(time.sleep(0.02)) or a * 2)(64)
    assert len(calls) == 1 + 2  # the check of all, and the measurement of `rep` runs


def test_the_last_line_says_what_was_found(lines):
    scaled([{"blk": 8}, {"blk": 0}, {"blk": 16}])(64)
    last = lines.messages[-1]
    assert last.startswith("tuned scale in ") and " ms; of 3 configurations 2 were measured, 1 failed" in last
    assert "{'blk': 8} is the best" in last or "{'blk': 16} is the best" in last
    lines.clear()
    AutoTuner(scaled([{}]).jit_impl.func, [{"n": 32, "blk": 8}]).set_compile_args(target="cpu", out_idx=[1]).run(1, 1)
    assert "of 1 configurations 1 were measured, 0 failed" in lines.messages[-1]


def test_a_terminal_is_shown_how_many_configurations_are_done(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(compiling, "_PATIENCE", 0.0)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        scaled([{"blk": 8}, {"blk": 16}, {"blk": 32}])(64 if shown else 96)
        for text in ("compiling scale", "measuring scale", "3/3"):
            assert (text in stream.getvalue()) is shown


def test_a_candidate_that_fails_while_it_is_measured_is_left_out(monkeypatch, lines):
    prepare, count = tuner.Measurement.prepare, iter(range(10))

    def failing(self, kernel):
        measure = prepare(self, kernel)
        return measure if next(count) else lambda n: 1 // 0

    monkeypatch.setattr(tuner.Measurement, "prepare", failing)
    kernel = scaled([{"blk": 8}, {"blk": 16}])(64)
    assert kernel.config == {"blk": 16} and "{'blk': 8} is skipped: ZeroDivisionError" in lines.text
