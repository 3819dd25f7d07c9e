"""Times on the CPU: medians, and caches as they are."""

import time

import numpy as np
import pytest

from tilelang.jit import timing
from tilelang.jit.timing import compared, do_bench


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


def test_the_number_of_runs_follows_from_the_median_of_the_estimate(monkeypatch):
    seen, now = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def fn():
        seen.append(1)
        now[0] += 0.05 if len(seen) == 2 else 1e-4

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


def disturbed_runs(ms, seed=0):
    """measure(function, runs): runs take ms[function]; in a third of the passes others work and they take 20 times as long."""
    rng, runs = np.random.default_rng(seed), dict.fromkeys(range(len(ms)), 0)

    def measure(k, n):
        runs[k] += n
        return [ms[k] * (20 if rng.random() < 0.33 else rng.uniform(1, 1.02))] * n

    return measure, runs


@pytest.mark.parametrize("seed", range(5))
def test_times_of_equal_configurations_differed_by_a_factor_of_20(seed):
    measure, _ = disturbed_runs([1.0] * 6 + [1.5], seed)
    found = compared(measure, 7, 100, True)
    equal = [found[k] for k in range(6)]
    assert max(equal) < 1.1 * min(equal) and found[6] > 1.3


def test_a_configuration_3000_times_slower_than_the_best_was_repeated():
    measure, runs = disturbed_runs([0.03, 90.0, 0.04, 1.5])
    found = compared(measure, 4, 100, True)
    assert min(found, key=found.get) == 0 and runs[1] <= 2 and runs[3] < 50 < runs[0]
    measure, runs = disturbed_runs([1.0, 1.8])
    compared(measure, 2, 100, True, stays=1.5)
    assert runs[1] <= 8 < runs[0]


def test_runs_end_when_times_are_stable_and_never_exceed_what_is_asked_for(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now) * 0.05)
    for ms, asked, most in ((0.5, 100, 220), (30.0, 100, 12), (30.0, 2, 2), (0.5, 1, 1)):
        taken = []
        compared(lambda k, n, ms=ms, taken=taken: taken.append(n) or [ms] * n, 1, asked, True)
        assert sum(taken) <= most, (ms, asked, taken)


def test_each_function_is_measured_first_at_times():
    order = []
    compared(lambda k, n: order.append(k) or [1.0] * n, 3, 4, False)
    assert order[:3] == [0, 1, 2] and order[3:6] == [1, 2, 0]
