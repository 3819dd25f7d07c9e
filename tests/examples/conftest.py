"""Loads example files, and the executions every example runs on in small sizes."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def example():
    """example("gemm/gemm.py"): the module of an example, loaded once."""
    loaded = {}
    sys.path.insert(0, str(EXAMPLES))

    def load(path):
        if path not in loaded:
            name = "example_" + path.removesuffix(".py").replace("/", "_")
            spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            loaded[path] = module
        return loaded[path]

    yield load
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(params=["tile", "simulator", "cpu"])
def place(request, example):
    """Where to run: the tile meaning, the device simulator (sm_80), the CPU target."""
    import harness

    return {"tile": harness.Place("cpu", "tile"),
            "simulator": harness.Place({"kind": "cuda", "arch": "sm_80"}, "simulator"),
            "cpu": harness.Place("cpu")}[request.param]


@pytest.fixture
def gpu(example):
    """The GPU, for tests marked gpu."""
    import harness

    return harness.Place("cuda")
