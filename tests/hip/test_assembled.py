"""The tool that lists which programs assemble for AMD GPUs."""

import pathlib
import sys

import pytest

pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import assembled
from checks import CHECKS


def test_kernels_of_an_example_are_assembled_while_its_check_runs_on_the_cpu():
    check = next(c for c in CHECKS if c.function == "check_experts")
    rows = assembled.of_check(check, "gfx90a")
    assert [r["kernel"] for r in rows] == ["matmul_grouped"] and rows[0]["mfma"] > 0 == rows[0]["spills"]


def test_a_program_that_does_not_fit_is_a_row_with_the_reason():
    (_, run), = assembled.work("plain: latent attention of 64")
    (row,) = run("gfx942")
    assert row["error"] == "shared-memory" and "a block has 65536" in row["reason"] and "fits with" in row["hint"]
