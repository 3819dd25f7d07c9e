"""The executions of programs that leave target and backend to the environment."""

import pytest


@pytest.fixture
def case(request, monkeypatch):
    """The execution named by the parameter, as the default of every kernel compiled in the test."""
    from spec_harness import SETTINGS, Case

    target, backend = SETTINGS[request.param]
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", target)
    monkeypatch.setenv("TILELANG_EXECUTION_BACKEND", backend)
    return Case(request.param)
