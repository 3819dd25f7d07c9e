"""Every program gives the same results as an independent reference on all executions."""

import pytest
from programs import cases, run_case

CASES = cases()
IDS = [c.name for c in CASES]


@pytest.mark.parametrize("backend, target", [("tile", "cpu"), ("simulator", {"kind": "cuda", "arch": "sm_80"}), (None, "cpu")],
                         ids=["tile", "simulator", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_agrees_with_reference(case, backend, target):
    error, bound = run_case(case, target, backend)
    assert error <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_agrees_with_reference_on_gpu(case):
    error, bound = run_case(case, "cuda")
    assert error <= bound
