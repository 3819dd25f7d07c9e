"""The timeline of a process: what is recorded, and how it is printed."""

import os
import subprocess
import sys
import threading

import pytest

from tilelang import log
from tilelang.env import env
from tilelang.tools import timeline

PROGRAM = """
import tilelang
import tilelang.language as T

@T.prim_func
def double(A: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        for i in T.serial(8):
            A[i] = A[i] * 2

tilelang.compile(double, target="cpu")
"""


@pytest.fixture
def recorder(monkeypatch):
    """Recording without the hooks that `start` sets for the rest of the process."""
    monkeypatch.setattr(log, "_recorder", log._Recorder())


def test_nothing_is_recorded_until_started():
    with log.phase("work"):
        pass
    assert log.phases() == [] and "no phase" in timeline.text()


def test_phases_of_threads_are_told_apart(recorder):
    with log.phase("outer"):
        with log.phase("inner"):
            sum(range(200_000))
        other = threading.Thread(target=lambda: log.phase("beside").__enter__().__exit__(), name="second")
        other.start()
        other.join()
    outer, inner, beside = (next(p for p in log.phases() if p.name == n) for n in ("outer", "inner", "beside"))
    assert (outer.depth, inner.depth, beside.depth) == (0, 1, 0) and beside.thread == "second"
    assert outer.begin <= inner.begin <= inner.end <= outer.end and 0 < inner.cpu <= inner.end - inner.begin + 20
    lines = timeline.text(0).splitlines()
    assert lines[0].startswith("timeline of") and "second:" in lines
    assert all(len(line.split("|")[1]) == timeline.WIDTH for line in lines if "|" in line)


def test_a_phase_that_fails_ends(recorder):
    with pytest.raises(KeyError), log.phase("fails"):
        raise KeyError
    with log.phase("next"):
        pass
    assert [(p.name, p.depth) for p in log.phases()] == [("fails", 0), ("next", 0)]


def test_a_process_prints_where_its_time_went(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    made = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=True,
                          env={**os.environ, "TILELANG_TIMELINE": "0.01", "TILELANG_CACHE_DIR": str(tmp_path / "c")})
    assert "timeline of" in made.stderr and "import tilelang.jit.compiling (" in made.stderr
    for name in ("compile", "legalize", "LLVM compiles", "write kernels"):
        assert any(line.split("|")[-1].strip().split(",")[0] == name for line in made.stderr.splitlines()), made.stderr


def test_the_setting_is_a_number(monkeypatch):
    monkeypatch.setenv("TILELANG_TIMELINE", "often")
    with pytest.raises(ValueError, match="TILELANG_TIMELINE"):
        assert env.TILELANG_TIMELINE
    monkeypatch.setenv("TILELANG_TIMELINE", "")
    assert env.TILELANG_TIMELINE == 0
