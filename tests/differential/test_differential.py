"""Generated programs agree between tile meaning, device simulator, CPU and (with one at hand) the GPU."""

import numpy as np
import pytest
from families import FAMILIES
from hypothesis import HealthCheck, given, seed, settings
from programs import run_case

import tilelang

# 300 programs in a default run: families x chunks x examples.
CHUNKS, EXAMPLES = 5, 20
EXECUTIONS = {"tile": ("cpu", "tile"), "simulator": ({"kind": "cuda", "arch": "sm_80"}, "simulator"), "cpu": ("cpu", None)}


def check(case, executions) -> None:
    for name, (target, backend) in executions.items():
        if backend == "assembled":
            assert tilelang.compile(case.program(), target=target)._built.files["kernel.hsaco"]
            continue
        error, bound = run_case(case, target, backend)
        assert error <= bound, f"{name}: error {error} exceeds {bound}"


def run_family(family, chunk, executions, examples):
    strategy, build = FAMILIES[family]

    @seed(1000 * chunk + len(family))
    @settings(max_examples=examples, deadline=None, database=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(strategy())
    def go(description):
        check(build(description), executions)

    go()


def chunks():
    """Of each family; the chunks behind the first wait for the nightly run, and test_differential_programs draws more."""
    return [pytest.param(f, c, marks=[pytest.mark.slow] if c else []) for f in FAMILIES for c in range(CHUNKS)]


@pytest.mark.core
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "chunk"), chunks())
def test_three_executions_agree(family, chunk):
    run_family(family, chunk, EXECUTIONS, EXAMPLES)


AMD = {chip: ({"kind": "hip", "mcpu": chip}, "simulator") for chip in ("gfx90a", "gfx942", "gfx950")}


@pytest.mark.core
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_waves_of_64_lanes_agree(family):
    run_family(family, 0, {"gfx942": AMD["gfx942"]}, 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chip", AMD)
@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_a_family_assemble_for_a_chip_and_agree(family, chip):
    pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
    run_family(family, 1, {chip: AMD[chip], "assembled": (AMD[chip][0], "assembled")}, EXAMPLES)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_agrees_with_reference(family, chunk):
    run_family(family, chunk, {"gpu": ("cuda", None)}, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_long_run_with_a_fresh_seed(family):
    run_family(family, int(np.random.default_rng().integers(10, 2**31)), EXECUTIONS, 500)
