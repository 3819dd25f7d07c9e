"""`reference` of the listed programs equals what they compute in NumPy and float64, within the bound of their types."""

import numpy as np
import pytest
from whole_programs import CASES


def test_the_list_has_the_kinds_of_programs_that_people_write():
    assert len(CASES) >= 60 and len({c.name for c in CASES}) == len(CASES)
    kinds = {c.kind for c in CASES}
    assert kinds >= {"elementwise", "norm", "softmax", "loss", "attention", "matmul", "moe", "convolution", "state", "sampling"}
    assert sum(c.kind == "attention" for c in CASES) >= 8 and sum(bool(c.also) for c in CASES) >= 4


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_the_reference_computes_the_program(case):
    for spec in (case.small, *case.also):
        args = case.arguments(spec)
        case.check(case.program.reference(**args), args)


@pytest.mark.parametrize("name", ["softmax", "attention_causal", "quantised_matmul"])
def test_the_reference_takes_and_gives_torch_tensors(name):
    import torch
    case = next(c for c in CASES if c.name == name)
    args = case.arguments()
    out = case.program.reference(**{k: torch.from_numpy(v) for k, v in args.items()})
    assert isinstance(out, torch.Tensor) and (out.numpy() == case.program.reference(**args)).all()
    assert np.isfinite(out.numpy()).all()
