"""Loads example files, and the executions every example runs on in small sizes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # examples are no package

import checks


@pytest.fixture(scope="session")
def example():
    """example("gemm/gemm.py"): the module of an example, loaded once."""
    return checks.load


@pytest.fixture(params=["tile", "simulator", "cpu"])
def place(request):
    """Where to run: the tile meaning, the device simulator (sm_80), the CPU target."""
    import harness

    return {"tile": harness.Place("cpu", "tile"),
            "simulator": harness.Place({"kind": "cuda", "arch": "sm_80"}, "simulator"),
            "cpu": harness.Place("cpu")}[request.param]


@pytest.fixture
def gpu():
    """The GPU, for tests marked gpu; what references took there is given back, for other processes' tests."""
    import harness
    from run_one import release

    yield harness.Place("cuda")
    release()
