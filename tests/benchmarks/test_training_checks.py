"""benchmarks/training_checks.py without a GPU: no function is forgotten, and planted faults are found."""

import importlib
import pkgutil
from dataclasses import replace

import pytest
import torch
import training_checks
from suite.training_cases import CASES

import tilelang.library
from tilelang.library.autograd import _FUNCTIONS

PUBLIC = {"attention_engine": "AttentionEngine", "element_map": "LinearAttentionEngine"}  # operators of other names


def test_every_function_with_a_gradient_has_a_case():
    for m in pkgutil.walk_packages(tilelang.library.__path__, "tilelang.library."):
        importlib.import_module(m.name)
    cases = {name.split()[0] for name in CASES}
    assert {PUBLIC.get(n, n) for n in _FUNCTIONS if not n.startswith("test")} <= cases


def checked(monkeypatch, columns, **changes):
    case = replace(CASES["softmax"], **changes)
    monkeypatch.setitem(CASES, "softmax", case)
    return training_checks.check("softmax", "cpu", 3, columns)


def test_a_right_function_has_no_faults(monkeypatch):
    row = checked(monkeypatch, ("error", "graph", "bits"))
    assert row["faults"] == {} and row["graph"] == "-" and row["bits"].startswith("0 of 3")


@pytest.mark.parametrize("column, said", [("error", "gradient 0 is off"), ("opcheck", "no operator"), ("bits", "other bits")])
def test_planted_faults_are_found(monkeypatch, column, said):
    ours, calls = CASES["softmax"].ours, []

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.softmax(-1)

        @staticmethod
        def backward(ctx, dy):
            calls.append(1)
            return dy * 0.01 * len(calls)

    row = checked(monkeypatch, (column,), ours=Off.apply if column != "bits" else lambda x: Off.apply(x) + 0 * ours(x))
    assert said in row["faults"][column]
