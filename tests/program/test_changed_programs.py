"""Changed programs become as many kernels as what they were made of, and compute what they say."""

import pytest
from changed_programs import CHANGED, agree


def kernels(program, case):
    given = {p.name: (shape, dt) for p, (shape, dt, *_) in zip(program.parameters, case.large.values()) if p.dtype is None}
    return program.tile_source(given, {"kind": "cuda", "arch": "sm_90a"}).count("@T.prim_func")


@pytest.mark.parametrize("name", CHANGED)
def test_as_many_kernels_and_right(name):
    case, program = CHANGED[name]
    assert kernels(program, case) == kernels(case.program, case)
    agree(program, list(case.arguments().values()), case)


def test_there_are_twenty():
    assert len(CHANGED) >= 20
