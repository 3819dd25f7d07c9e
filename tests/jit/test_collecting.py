"""The garbage collector runs seldom while programs are compiled, and as before afterwards."""

import gc
import threading

import pytest

import tilelang
import tilelang.language as T
from tilelang.jit import building
from tilelang.jit.collecting import NEW_OBJECTS, collect_meanwhile, rarely_collected


@pytest.fixture(autouse=True)
def as_it_was():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_set_back_also_by_a_failure():
    with pytest.raises(KeyError), rarely_collected():
        assert gc.get_threshold() == (NEW_OBJECTS, 10, 10)
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_several_threads_sets_it_back():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with rarely_collected():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with rarely_collected():
        thread.start()
        assert entered.wait(10)
    assert gc.get_threshold()[0] == NEW_OBJECTS
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", ((0, 10, 10), (NEW_OBJECTS + 1, 5, 5)))
def test_a_collector_that_runs_more_seldom_is_left(own):
    gc.set_threshold(*own)
    with rarely_collected():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_somebody_else_sets_stays():
    with rarely_collected():
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)


def test_compilations_are_inside(monkeypatch):
    seen = []
    monkeypatch.setattr(building, "build_cpu", lambda *a, make=building.build_cpu: seen.append(gc.get_threshold()) or make(*a))

    @T.prim_func
    def double(A: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for i in T.serial(8):
                A[i] = A[i] * 2

    tilelang.disable_cache()
    try:
        tilelang.compile(double, target="cpu")
    finally:
        tilelang.enable_cache()
    assert seen == [(NEW_OBJECTS, 10, 10)] and gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("enabled", (True, False))
def test_what_a_compilation_made_is_looked_at_while_it_waits_and_not_again_at_its_end(enabled):
    runs = []
    gc.callbacks.append(watch := lambda when, info: runs.append(info["generation"]) if when == "start" else None)
    try:
        with rarely_collected():
            gc.collect()
            made = [[] for _ in range(5000)]
            runs.clear()
            if not enabled:
                gc.disable()
            collect_meanwhile()
            assert len(made) == 5000 and runs == ([0] if enabled else [])
            collect_meanwhile()
            assert len(runs) <= 1
    finally:
        gc.enable()
        gc.callbacks.remove(watch)
