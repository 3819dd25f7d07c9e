"""Every program gives the same results as an independent reference on all executions."""

import pytest
from programs import cases, run_case

from tilelang.transform import PassContext

SM90 = {"kind": "cuda", "arch": "sm_90a"}
HOPPER = {"tl.enable_hopper": True}
CASES = cases()
IDS = [c.name for c in CASES]


@pytest.mark.parametrize("backend, target", [("tile", "cpu"), ("simulator", {"kind": "cuda", "arch": "sm_80"}), (None, "cpu")],
                         ids=["tile", "simulator", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_agrees_with_reference(case, backend, target):
    error, bound = run_case(case, target, backend)
    assert error <= bound


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_agrees_with_reference_by_tma_and_wgmma(case):
    """The same programs as roles, rings and wgmma, where they can be."""
    with PassContext(config=HOPPER):
        error, bound = run_case(case, SM90, "simulator")
    assert error <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, HOPPER], ids=["plain", "hopper"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_agrees_with_reference_on_gpu(case, config):
    with PassContext(config=config):
        error, bound = run_case(case, "cuda")
    assert error <= bound
