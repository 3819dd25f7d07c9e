"""TileLang programs compiled for AMD chips: the interpreted machine code leaves the bits of the device simulator.

The programs of tests/programs.py, and random ones of tests/differential; more of those each night:

    python tests/amd/isa_random.py --programs 1000 --seed 1 --chip 942
"""

from __future__ import annotations

import sys
from typing import Any

import isa_decode
import isa_hip
import isa_launch
import numpy as np
import pytest

sys.path.insert(0, str(isa_hip.FOLDER.parent))

import programs

pytestmark = isa_hip.needs_zig
CASES = programs.cases()
APPROXIMATE = ("softmax", "attention")  # their exponentials are approximations by one instruction


def results(case: programs.Case, chip: str, order: int | None = None) -> tuple[list[np.ndarray], list[np.ndarray], list[Any]]:
    """Outputs of the interpreter and of the device simulator, and the inputs."""
    import tilelang
    from tilelang.target import Target
    from tilelang.transform.pipeline import lower

    func, target = case.program(), {"kind": "hip", "mcpu": f"gfx{chip}"}
    inputs = case.inputs(np.random.default_rng(0))
    want = tilelang.compile(func, out_idx=case.out_idx, target=target, execution_backend="simulator")(*inputs)
    want = want if isinstance(want, list) else [want]
    lowered = lower(func.func, Target(target), {})
    names = [buffer.name for _, buffer in lowered.host.buffers]
    given, made = iter(inputs), iter(want)
    arrays = [np.zeros_like(next(made)) if n in case.out_idx else next(given) for n in range(len(names))]
    isa_launch.launch(lowered, tilelang.compile(func, target=target), dict(zip(names, arrays, strict=True)), order)
    return [arrays[n] for n in case.out_idx], want, inputs


@pytest.mark.parametrize("chip", isa_decode.CHIPS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_machine_code_leaves_the_bits_of_the_simulator(case: programs.Case, chip: str) -> None:
    got, want, inputs = results(case, chip)
    for g, w in zip(got, want, strict=True):
        if case.name.startswith(APPROXIMATE):
            assert np.abs(programs.wide(g) - programs.wide(w)).max() <= case.bound(*inputs)
        else:
            np.testing.assert_array_equal(g.view(np.uint8), w.view(np.uint8))


@pytest.mark.parametrize("name", ["gemm_NT", "reduce_sum", "gemm_stages3"])
def test_any_order_of_waves_leaves_the_same_bits(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    got, want, _ = results(case, "942", order=7)
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("seed", range(1_000_003, 1_000_043))
def test_random_programs_leave_the_bits_of_the_simulator(seed: int, tmp_path: Any) -> None:
    import isa_random

    path = tmp_path / "program.py"
    path.write_text(isa_random.source(isa_random.make_program(seed)))
    status, why = isa_random.outcome(path, isa_decode.CHIPS[seed % 3])
    assert status in ("equal", "near", "refused"), why
