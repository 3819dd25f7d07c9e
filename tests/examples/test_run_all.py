"""The command that runs every example: what it prints and records, and that a bad example costs only itself."""

import json
import subprocess
import sys

import pytest
from checks import EXAMPLES
from measuring import figures
from run_all import Example, Row, rows_of, run, share, table

GOOD = """
from harness import HERE, Comparison
def check(n: int = 3, on=HERE):
    assert on.target == "cpu" and n == 4
    return Comparison("good", 0.5, 1.0)
def wrong(on=HERE):
    return [Comparison("good", 0.0, 0.0), Comparison("bad", 2.0, 1.0)]
def fails(on=HERE):
    raise ValueError("no such size\\nmore")
"""
HANGS = """
import time
from harness import HERE, Comparison
def check(on=HERE):
    return Comparison("good", 0.0, 1.0)
def hangs(on=HERE):
    time.sleep(1000)
"""
DIES = """
import os, sys
from harness import HERE
def check(on=HERE):
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(3)
"""


def example(folder, name, text, functions, measure=False):
    (folder / name).write_text(text)
    return Example(str(folder / name), [Row(name, f, {"n": 4} if f == "check" and "n: int" in text else {}, "cpu")
                                        for f in functions], 1, measure)


@pytest.mark.slow
def test_a_bad_example_costs_only_itself(tmp_path):
    good = example(tmp_path, "good.py", GOOD, ["check", "wrong", "fails"], measure=True)
    hangs = example(tmp_path, "hangs.py", HANGS, ["check", "hangs", "check"])
    dies = example(tmp_path, "dies.py", DIES, ["check"])
    seen = []
    run([good, hangs, dies], 1, 12.0, 10.0, seen.append)
    assert seen == [good, hangs, dies]
    assert [r.state for r in good.rows] == ["ok", "wrong", "failed"]
    assert good.rows[0].sizes == {"n": 4} and good.rows[2].error == "ValueError: no such size"
    assert good.rows[1].worst["name"] == "bad" and share(good.rows[1].worst) == 2.0
    assert [r.state for r in hangs.rows] == ["ok", "stopped", "stopped"] and "12 s" in hangs.rows[1].error
    assert dies.rows[0].state == "lost" and dies.rows[0].error == "out of luck"
    assert all(e.process.poll() is not None for e in (good, hangs, dies))


def test_real_sizes_on_a_gpu_and_hopper_examples_interpreted_elsewhere():
    from checks import CHECKS

    real, small = rows_of(CHECKS, True, False), rows_of(CHECKS, False, False)
    assert real.keys() == small.keys() and len(real) == len({c.file for c in CHECKS})
    assert all(r.backend == "simulator" for r in real["hopper/gemm_by_hand.py"])
    assert rows_of(CHECKS, True, True)["hopper/gemm_by_hand.py"][0].backend is None
    assert small["topk/topk.py"][0].sizes == dict(m=19, n=40, k=3) and real["topk/topk.py"][0].sizes == {}


def test_times_become_rates_beside_torch():
    call = {"kernel": "k", "ms": 0.5, "tflops": 300.0, "gb_per_s": 80.0, "peer": "torch.matmul", "peer_ms": 0.25}
    exact = {"name": "c", "error": 0.0, "bound": 0.0, "ok": True}
    row = Row("gemm.py", "check_gemm", {"m": 4}, state="ok", comparisons=[exact], calls=[
        call, call | {"tflops": 0.1, "peer_ms": None, "peer_error": "no"}])
    assert [figures(c) for c in row.calls] == [
        ("500.0 us", "300 TFLOP/s", "torch.matmul 250.0 us, 0.50x"),
        ("500.0 us", "80 GB/s", "torch.matmul: no")]
    assert table([row, Row("a.py", "check", {}, state="failed", error="[x] y")]).row_count == 3


def test_calls_are_measured_afterwards():
    from measuring import Measured

    class Kernel:
        report_data = {"name": "k", "kernels": [{"limits": {"flops": f, "bytes": 1e6}} for f in (2e9, 0.0)]}

    calls, ran = Measured(), []
    calls.beside("nothing", lambda: None)
    calls.called(Kernel(), lambda: ran.append(1))
    calls.beside("numpy", lambda: ran.append(2))
    call, = calls.calls
    assert (call.kernel, call.flops, call.bytes, call.peer) == ("k", 2e9, 2e6, "numpy") and ran == []
    from harness import Place

    Place(measured=calls).work(flops=7.0, nbytes=3.0)  # the kernel's own report comes first
    assert (call.flops, call.bytes) == (2e9, 2e6)
    calls.called(len, lambda: None)
    Place(measured=calls).work(nbytes=3.0)
    assert calls.calls[1].bytes == 3.0
    assert (calls.calls[1].kernel, calls.calls[1].flops) == ("len", None)


@pytest.mark.timeout(200)
def test_the_command_writes_a_record(tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLES / "run_all.py"), "--only", "topk/topk", "--out", str(tmp_path)],
                          capture_output=True, text=True, check=False, env=None)
    assert done.returncode == 0, done.stdout + done.stderr
    path, = tmp_path.glob("*-examples.json")
    record = json.loads(path.read_text())
    assert record["rows"][0]["state"] == "ok" and record["rows"][0]["example"] == "topk/topk.py"
    assert "1 of 1 checks agree" in done.stdout
