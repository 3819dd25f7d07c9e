"""benchmarks/stress.py without a GPU: a case that is right, one whose bits change, one that fails, one that takes too long."""

import json
from dataclasses import replace

import pytest
import stress
import torch
from suite.stress_cases import CASES


def test_the_cases_are_of_every_library_kernel():
    names = " ".join(CASES)
    for word in ("nt", "nn", "tn", "tt", "bf16", "tf32", "int8", "fp8 by block", "batched", "grouped", "long k", "odd",
                 "causal", "window", "packed", "d64", "d256", "quantised", "decoding", "few tiles", "clusters"):
        assert word in names
    assert stress.chosen("fp8*") == ["fp8", "fp8 fast", "fp8 by block"]
    assert stress.chosen("") == list(CASES)
    with pytest.raises(SystemExit, match="no case is called 'conv'"):
        stress.chosen("conv")


def test_bits_that_change_are_counted():
    case = CASES["odd"]
    calls = []

    def unsteady(t):
        out = case.run(t)
        calls.append(1)
        if len(calls) == stress.SETS + 3:
            out[0, 0] += 1
        return out

    found = stress.stress(replace(case, run=unsteady), 5, "cpu")
    assert found["wrong"] == 1 and not stress.good(found)
    assert "WRONG" in stress.row(found) and "1 of 5 launches" in stress.row(found)


def test_a_wrong_result_is_seen_though_its_bits_stay():
    case = CASES["odd"]
    found = stress.stress(replace(case, run=lambda t: case.run(t) * 1.01), 2, "cpu")
    assert found["wrong"] == 0 and found["error"] > found["limit"] and not stress.good(found)


def test_nan_has_bits_of_its_own():
    x = torch.tensor([float("nan"), 1.0])
    assert torch.equal(stress.bits(x), stress.bits(x.clone()))
    assert stress.relative(x, x.double()) == float("inf")


def test_a_failing_case_leaves_the_others(monkeypatch, capsys):
    def fails(t):
        raise ValueError("no such kernel")

    monkeypatch.setitem(CASES, "failing", replace(CASES["odd"], name="failing", run=fails))
    stress.worker(["failing", "odd"], 2, "cpu")
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert [x for x in lines if "problem" in x] == [{"case": "failing", "problem": "ValueError: no such kernel"}]
    assert stress.good(lines[-1])


def test_one_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stress.os, "environ", dict(stress.os.environ))
    assert stress.main(["--device", "cpu", "--only", "odd", "--launches", "3", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "stress.json").read_text())
    assert report["results"][0]["case"] == "odd" and report["sanitizer_skipped"] == "no GPU"
    assert "1 cases, 3 launches each, 0 bad" in capsys.readouterr().out


def test_a_case_that_takes_too_long_is_broken_off(capsys):
    (found,) = stress.supervise(["odd"], 1, "cpu", 0.01)
    assert found == {"case": "odd", "problem": "not done after 0 s"}


def test_what_the_sanitizer_says(tmp_path):
    tool = tmp_path / "tool"
    result = {"case": "nt", "launches": 3, "error": 0, "limit": 1, "wrong": 0, "wrong_streams": 0, "seconds": 1}
    tool.write_text(f"#!/bin/sh\necho '{json.dumps(result)}'\necho '========= ERROR SUMMARY: 2 errors'\nexit 9\n")
    tool.chmod(0o755)
    found = stress.memcheck("nt", str(tool), "memcheck", 30)
    assert not found["ok"] and found["last"] == "========= ERROR SUMMARY: 2 errors" and len(found["errors"]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_library_kernels_on_a_gpu(name):
    """Right, and the same bits from launch to launch and from three streams."""
    found = stress.stress(CASES[name], 60, "cuda")
    assert stress.good(found), found
