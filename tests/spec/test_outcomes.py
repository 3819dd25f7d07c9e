"""Executions are recorded where they end, and a run fails when a marked test does something else than recorded."""

import os
import pathlib
import subprocess
import sys

import completed
import numpy as np
import outcomes
import pytest
from everywhere import cuda_text, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.runtime import nvrtc

TESTS = pathlib.Path(__file__).resolve().parents[1]


@T.prim_func
def twice(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=8):
        for i in T.Parallel(8):
            B[i] = A[i] * 2


@pytest.mark.parametrize("execution", ["tile", "simulator", "cpu"])
def test_an_execution_is_seen_each_time_it_ends(execution):
    for _ in range(2):  # the second kernel comes from the cache
        completed.begin()
        run(twice, np.arange(8, dtype=np.int32), on=execution)
        assert completed.taken() == (execution,)


def test_errors_point_at_the_user_and_not_at_the_watcher():
    for use in (lambda: tilelang.compile(twice, target="cpu")(np.zeros(8, np.int32)),
                lambda: tilelang.compile(twice, execution_backend="no such")):
        with pytest.raises(Exception) as e:
            use()
        assert "completed.py" not in str(e.value)


def test_text_is_seen_as_printed_or_assembled():
    completed.begin()
    cuda_text(twice, assemble=False)
    assert completed.taken() == ("printed",)
    if nvrtc.available():
        cuda_text(twice)
        assert completed.taken() == ("cuda",)
        for _ in range(2):
            completed.begin()
            tilelang.compile(twice, target={"kind": "cuda", "arch": "sm_80"})
            assert completed.taken() == ("cuda",)
    completed.begin()
    tilelang.lower(twice, target={"kind": "cuda", "arch": "sm_80"})
    assert completed.taken() == ("printed",)


def test_refusals_are_what_the_test_caught_of_the_package():
    completed.begin()
    with pytest.raises(ValueError):
        int("x")
    assert completed.taken() == ()
    with pytest.raises(TileLangError):
        tilelang.compile(twice, target="cpu", execution_backend="no such")
    assert completed.taken() == ("refusal",)
    completed.begin()
    kernel = tilelang.compile(twice, target="cpu")
    with pytest.raises((ValueError, TypeError, RuntimeError)) as e:
        kernel(np.zeros(8, np.int32))
    assert completed.taken() == ("refusal" if isinstance(e.value, TileLangError) else "error",)


def test_cases_are_stored_with_those_that_differ_named(tmp_path):
    book = outcomes.Outcomes({"a.py::t": {"[1]": "tile", "[2]": "tile", "[3]": "cpu"}, "a.py::u": {"": "gpu"}}, {"device": "d"})
    file = tmp_path / "o.json"
    file.write_text(outcomes.text_of(book))
    again = outcomes.read(file)
    assert outcomes.text_of(again) == file.read_text()
    assert again.expected("a.py::t", "[3]") == "cpu" and again.expected("a.py::t", "[2]") == "tile"
    assert again.expected("a.py::u", "") == "gpu" and again.expected("a.py::v", "") is None
    assert again.of("a.py::t") == ("tile", "cpu") and again.about == {"device": "d"}


def test_differences_are_told():
    book = outcomes.Outcomes({"t": {outcomes.ANY: "tile cuda", "[2]": "tile", "[3]": outcomes.SKIPPED}})

    def told(case, done, assembles=True):
        return outcomes.difference(book, "t", case, done, assembles)

    assert told("[1]", "tile cuda") == ""
    assert told("[1]", "tile printed") == "no longer completes: cuda; not recorded: printed"
    assert told("[1]", "tile printed", assembles=False) == told("[1]", "tile", assembles=False) == ""
    assert told("[2]", "tile cpu") == "not recorded: cpu" and told("[2]", "") == "no longer completes: tile"
    assert told("[2]", "tile gpu") == "" == told("[3]", "tile")  # a machine that has more is no difference
    assert outcomes.difference(book, "u", "", "tile", True) == "is not recorded"


PLANTED = """
import completed
import pytest

@pytest.mark.spec("L5:ptr")
@pytest.mark.parametrize("k", [1, 2])
def test_same(k):
    completed.completed("tile")

@pytest.mark.spec("L5:ptr")
def test_lost():
    pass

@pytest.mark.spec("L5:ptr")
def test_new():
    completed.completed("tile")
    completed.completed("cpu")

@pytest.mark.spec("L5:ptr")
def test_unknown():
    pass

def test_unmarked():
    completed.completed("cpu")

@pytest.mark.spec("T.copy")
def test_on_a_gpu():
    completed.completed("gpu")
"""
CONFTEST = """
import pathlib

import outcomes

outcomes.FILES = {"cpu": pathlib.Path(__file__).parent / "outcomes.json"}

def pytest_addoption(parser):
    outcomes.add_options(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "spec(row, ...): rows")
    outcomes.configure(config)
"""


def test_a_run_fails_when_a_marked_test_does_something_else_than_recorded(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_planted.py").write_text(PLANTED)
    paths = [str(TESTS), str(TESTS / "spec"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def runs(*tests):
        (tmp_path / "outcomes.json").write_text(outcomes.text_of(outcomes.Outcomes({
            f"test_planted.py::test_{t}": {"": "tile"} for t in ("same", "lost", "new")})))
        done = subprocess.run([sys.executable, "-m", "pytest", "-n", "1", "--rootdir", str(tmp_path), *tests],
                              cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, said = runs("test_planted.py")
    assert code == 1 and "7 passed" in said, said
    assert "test_planted.py::test_lost: no longer completes: tile" in said
    assert "test_planted.py::test_new: not recorded: cpu" in said
    assert "test_planted.py::test_unknown: is not recorded" in said
    assert "python -m pytest --record-outcomes tests/test_planted.py; python tests/spec/spec_status.py --write" in said
    assert "test_same" not in said and "test_unmarked" not in said and "test_on_a_gpu" not in said
    code, said = runs("test_planted.py::test_same", "test_planted.py::test_unmarked")
    assert code == 0 and "outcomes" not in said, said
