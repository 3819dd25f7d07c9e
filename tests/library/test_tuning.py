"""The tuner: races, what is kept and where, and when a call is tuned; times are made up."""

import json
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest

from tilelang.env import env
from tilelang.jit import compiling
from tilelang.library import tuning
from tilelang.library.place import Place
from tilelang.log import logger
from tilelang.runtime.cache import DiskCache
from tilelang.target import Target
from tilelang.transform.framework.scope import PassContext, current_config, plan_only

CPU = Target("cpu")


class Clock:
    """Times by the name of what runs: a candidate's `run` has it as an attribute."""

    def __init__(self, ms):
        self.ms, self.measured, self.released = ms, [], 0

    def __call__(self, like, target, backend):
        return self

    def measure(self, fn, n, flush):
        assert flush
        name = fn()
        self.measured.append(name)
        found = self.ms[name]
        return [found(len(self.measured)) if callable(found) else found] * n

    def release(self):
        self.released += 1


def task(names, like=None, results=None, made=None, key="key"):
    """Candidates whose result is 1, or what `results` says."""

    def make(name):
        def run(out):
            out[:] = (results or {}).get(name, 1)
            return name

        if made is not None:
            made.append(name)
        if (results or {}).get(name) == "broken":
            raise ValueError("no such instruction")
        return run

    candidates = [tuning.Candidate({"name": n}, lambda n=n: make(n), n) for n in names]
    return tuning.Task("a test", key, np.zeros(1) if like is None else like, CPU, None, lambda: candidates,
                       lambda: (np.zeros(3),), lambda x, y: bool((x[0] == y[0]).all()))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    return DiskCache("autotuner")


@pytest.fixture
def lines(caplog):
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.DEBUG, logger="tilelang"):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("ms, best", [
    ((1.0, 0.9, 0.95), 1), ((1.0, 0.99, 1.2), 0), ((1.0, 0.985), 0), ((1.0, 0.97, 5.0), 1), ((1.0,), 0), ((1.0, 2.0, 3.0), 0)])
def test_the_fastest_wins_if_it_is_surely_faster(ms, best):
    assert tuning.race(lambda k, n: [ms[k]] * n, len(ms))[0] == best
    assert tuning.SURE == 0.98


def test_one_turn_in_which_it_is_slower_is_enough_to_lose():
    calls = {0: 0, 1: 0}

    def measure(k, n):
        calls[k] += 1
        return [1.0 if k == 0 else 1.1 if calls[1] == 6 else 0.8] * n

    best, times = tuning.race(measure, 2)
    assert best == 0 and times == pytest.approx({0: 1.0, 1: 0.8})


def test_slow_candidates_leave_early_and_long_runs_are_few():
    runs = {k: 0 for k in range(3)}

    def measure(k, n):
        runs[k] += n
        return [(10.0, 9.0, 50.0)[k]] * n

    assert tuning.race(measure, 3)[0] == 1
    assert runs[2] == 1 and runs[0] == runs[1] <= 1 + 2 * (tuning._PASSES + 3)


def test_outliers_do_not_count():
    slow = [0.9] * 6 + [9.0] * 2
    assert tuning.race(lambda k, n: [1.0] * n if k == 0 else (slow * 4)[:n], 2)[0] == 1


def test_the_best_is_found_once_and_kept(disk, lines):
    clock, made = Clock({"model": 2.0, "other": 1.0, "third": 3.0}), []
    tuner = tuning.Tuner(clock, disk)
    found = tuner.choose(task(("model", "other", "third"), made=made))
    assert found.choice == "other" and sorted(made) == ["model", "other", "third"] and clock.released == 1
    assert "tuned a test" in lines.text and '"other"' in lines.text
    count = len(clock.measured)
    assert tuner.choose(task(("model", "other", "third"), made=made)).choice == "other"
    assert len(clock.measured) == count and len(made) == 3
    (folder,) = [p for p in disk.root.iterdir() if p.name != ".staging"]
    meta = json.loads((folder / "manifest.json").read_text())["meta"]
    assert meta["config"] == {"name": "other"} and meta["times"]['{"name": "other"}'] == 1.0

    again = tuning.Tuner(Clock({}), disk)  # another process: nothing is compiled or timed
    assert again.choose(task(("model", "other", "third"), made=made)).choice == "other" and len(made) == 3
    assert again.choose(task(("model",), key="other key")).choice == "model"  # one candidate: no race


def test_other_keys_and_devices_are_tuned_anew(disk, monkeypatch):
    clock = Clock({"model": 2.0, "other": 1.0})
    tuner = tuning.Tuner(clock, disk)
    tuner.choose(task(("model", "other")))
    tuner.choose(task(("model", "other"), key="another"))
    monkeypatch.setattr(tuning, "_device", lambda index: ("another device", 132, 13, 0))
    tuner.choose(task(("model", "other")))
    monkeypatch.setattr(tuning, "compiler_stamp", lambda: "another text of the package")
    tuner.choose(task(("model", "other")))
    tuner.choose(replace(task(("model", "other")), target=Target("cuda")))
    with PassContext(config={"tl.enable_fast_math": True}):
        tuner.choose(task(("model", "other")))
    assert len(tuner.found) == 6


def test_damaged_and_old_entries_are_found_anew(disk, lines):
    clock = Clock({"model": 2.0, "other": 1.0, "new": 0.5})
    tuning.Tuner(clock, disk).choose(task(("model", "other")))
    (folder,) = [p for p in disk.root.iterdir() if p.name != ".staging"]
    text = (folder / "manifest.json").read_text()
    for bad in (text[:40], text.replace("other", "model"), "[]"):
        (folder / "manifest.json").write_text(bad)
        count = len(clock.measured)
        assert tuning.Tuner(clock, disk).choose(task(("model", "other"))).choice == "other" and len(clock.measured) > count
    assert "damaged" in lines.text
    # whole, but of a candidate that is none any more
    assert tuning.Tuner(clock, disk).choose(task(("model", "new"))).choice == "new" and "none any more" in lines.text
    assert tuning.Tuner(Clock({}), disk).choose(task(("model", "new"))).choice == "new"


def test_the_disk_can_be_left_out(disk, monkeypatch):
    monkeypatch.setenv("TILELANG_AUTO_TUNING_DISABLE_CACHE", "1")
    assert tuning.Tuner(Clock({"model": 2.0, "other": 1.0}), disk).choose(task(("model", "other"))).choice == "other"
    assert not disk.root.exists()


def test_wrong_and_broken_candidates_are_told_and_not_used(disk, lines):
    clock = Clock({"model": 2.0, "wrong": 0.1, "good": 1.0, "broken": 0.1})
    results = {"wrong": 2, "broken": "broken"}
    found = tuning.Tuner(clock, disk).choose(task(("model", "wrong", "broken", "good"), results=results))
    assert found.choice == "good" and not {"wrong", "broken"} & set(clock.measured)
    assert "another result" in lines.text and "does not compile" in lines.text
    # nothing left but the model's: no race
    found = tuning.Tuner(clock, disk).choose(task(("model", "wrong"), results=results, key="two"))
    assert found.choice == "model"


def test_a_race_that_fails_leaves_the_model_its_choice(disk, lines):
    def out_of_memory(count):
        raise MemoryError("no room for results")

    tuner = tuning.Tuner(Clock({"model": 1.0, "other": out_of_memory}), disk)
    assert tuner.choose(task(("model", "other"))).choice == "model" and "no room" in lines.text
    assert not disk.root.exists() and tuner.clock.released == 1  # another process may try again
    count = len(tuner.clock.measured)
    assert tuner.choose(task(("model", "other"))).choice == "model" and len(tuner.clock.measured) == count


def test_threads_wait_for_one_race(disk):
    clock, made = Clock({"model": 2.0, "other": 1.0}), []
    tuner, got = tuning.Tuner(clock, disk), []
    start = threading.Barrier(4)

    def job():
        start.wait()
        got.append(tuner.choose(task(("model", "other"), made=made)).choice)

    threads = [threading.Thread(target=job) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == ["other"] * 4 and len(made) == 2


class Tensor:
    """A tensor of a GPU, as far as the tuner looks."""

    class device:
        type, index = "cuda", 0


def test_when_a_call_is_tuned(monkeypatch):
    x, cuda = np.zeros(1), Target({"kind": "cuda", "arch": "sm_90a"})
    assert Place(CPU).tuned(None, x) is False and Place(CPU).tuned(False, x) is False
    assert Place(CPU).tuned(True, x) is False  # nothing measures there
    assert Place(cuda, "simulator").tuned(True, x) is False
    monkeypatch.setattr(tuning, "tuner", tuning.Tuner(Clock({})))
    assert Place(CPU).tuned(True, x) is True and Place(CPU).tuned(None, x) is False
    with env.using(TILELANG_LIBRARY_TUNING="1"):
        assert Place(CPU).tuned(None, x) is True and Place(CPU).tuned(False, x) is False

    class Torch:
        class cuda:
            is_current_stream_capturing = staticmethod(lambda: capturing)

    monkeypatch.setitem(tuning.sys.modules, "torch", Torch)
    capturing = True
    assert tuning.captured(Tensor) and Place(cuda).tuned(True, Tensor) is None
    capturing = False
    assert Place(cuda).tuned(True, Tensor) is True and not tuning.captured(x)


def test_only_kernels_on_a_gpu_have_a_clock():
    cuda = Target({"kind": "cuda", "arch": "sm_90a"})
    assert tuning.gpu_clock(np.zeros(1), cuda, None) is None
    assert tuning.gpu_clock(Tensor, CPU, None) is None and tuning.gpu_clock(Tensor, cuda, "tile") is None


def test_progress_is_shown_where_somebody_looks(monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(compiling, "_PATIENCE", 0.0)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        with compiling.progress("tuning a test", 2) as step:
            step()
            step()
        assert ("tuning a test" in stream.getvalue()) is shown is ("2/2" in stream.getvalue())


def test_candidates_are_compiled_in_threads_and_counted():
    """With the caller's pass configs; all but the model's as they are planned or not at all."""
    steps, names, seen = [], [threading.current_thread().name], {}

    def make(k):
        names.append(threading.current_thread().name)
        seen[k] = plan_only(), current_config()
        return lambda out: None

    with PassContext(config={"tl.enable_fast_math": True}):
        found = tuning.compiled([tuning.Candidate({"k": k}, lambda k=k: make(k), k) for k in range(3)], lambda: steps.append(1))
    assert len(found) == 3 and len(steps) == 3 and names[0] not in names[1:]
    assert seen == {k: (k > 0, {"tl.enable_fast_math": True}) for k in range(3)}


def test_at_home_leaves_arrays_alone():
    with tuning.at_home(np.zeros(1)):
        pass
