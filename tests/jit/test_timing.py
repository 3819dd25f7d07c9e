"""Times on the CPU: medians, and caches as they are."""

import time

import numpy as np
import pytest

import tilelang
from tilelang.autotuner import tuner
from tilelang.jit import timing
from tilelang.jit.timing import do_bench


def disturbed():
    """A function of 0.1 ms, of whose runs every fifth takes 20 ms."""
    runs = iter(range(10**6))

    def fn():
        end = time.perf_counter() + (20e-3 if next(runs) % 5 == 4 else 1e-4)
        while time.perf_counter() < end:
            pass

    return fn


def test_a_mean_with_disturbed_runs_was_the_time_of_a_cpu_kernel():
    assert do_bench(disturbed(), _n_warmup=1, _n_repeat=15, device="cpu") < 3
    assert do_bench(disturbed(), _n_warmup=1, _n_repeat=15, device="cpu", return_mode="mean") > 3


def test_the_number_of_runs_follows_from_the_median_of_the_estimate():
    seen = []

    def fn():
        seen.append(1)
        time.sleep(0.05 if len(seen) == 2 else 1e-4)

    do_bench(fn, warmup=1, rep=20, device="cpu")
    assert len(seen) > 30  # the mean, 10 ms, would give 9


def test_small_working_sets_stay_in_the_caches(monkeypatch):
    class Buffers(dict):
        def __setitem__(self, key, value):
            raise AssertionError("memory is written between runs")

    monkeypatch.setattr(timing, "_flush_buffers", Buffers())
    do_bench(lambda: None, _n_warmup=1, _n_repeat=3, device="cpu")
    with pytest.raises(AssertionError, match="between runs"):
        do_bench(lambda: None, _n_warmup=1, _n_repeat=3, device="cpu", cache_size=1)


def test_the_tuner_compared_means(monkeypatch):
    asked = []
    monkeypatch.setattr(tuner, "do_bench", lambda fn, **options: asked.append(options["return_mode"]) or 1.0)

    @tilelang.autotune(configs=[{"b": 32}, {"b": 64}])
    @tilelang.jit(target="cpu", out_idx=[1])
    def make(n, b=32):
        import tilelang.language as T

        @T.prim_func
        def f(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(n // b, threads=32) as k:
                for i in T.Parallel(b):
                    B[k * b + i] = A[k * b + i]

        return f

    with tilelang.env.using(TILELANG_AUTO_TUNING_DISABLE_CACHE="1"):
        kernel = make(192)
    assert asked == ["median", "median"] and (kernel(np.ones(192, np.float32)) == 1).all()
