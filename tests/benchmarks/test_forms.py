"""benchmarks/forms.py: its forms, references and providers, in small sizes on the CPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from suite.forms import FORMS, Form, accuracy, make, ours, reference  # noqa: E402


def small(f: Form) -> Form:
    return replace(f, m=min(f.m, 20), n=48, k=192 if f.sparse else 160, batch=3 if f.batch else 0, groups=4 if f.groups else 0)


KINDS = {small(f).name: small(f) for _, f in FORMS.values()}


@pytest.mark.parametrize("name", KINDS)
def test_ours_is_within_the_bound_and_another_result_is_not(name):
    f = KINDS[name]
    t = make(f, "cpu")
    parts, out = reference(f, t), ours(f, t)()
    assert accuracy(parts, out)[0] <= 1.0
    wrong = out.clone()
    wrong[..., -1, :] = wrong[..., -1, :] * 2 + 3
    assert accuracy(parts, wrong)[0] > 1.0
    wrong = out.clone()
    wrong[..., -1, -1] = float("nan") if out.is_floating_point() else -2**31
    assert accuracy(parts, wrong)[0] > 1.0


def test_names_tell_forms_apart():
    assert len(FORMS) == len({f for _, f in FORMS.values()}) > 80
    assert {g for g, _ in FORMS.values()} >= {"tf32", "i8", "fp8", "fp8-block", "batched", "grouped", "epilogue", "wide-out"}
