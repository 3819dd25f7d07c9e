"""benchmarks/peers.py without a GPU: selection, checks, rounds, restarts, the table and the JSON."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import mock_providers
import peers
import pytest
import torch
from suite import bars, cold, compiling, problems, programs, providers, report, supervising
from suite import record as rec
from suite.measuring import HostMeter
from suite.provider_cubin import Launch, argument
from suite.provider_torch import plain
from suite.provider_tilelang import ATTENTION_TILES, GEMM_TILES
from suite.record import Record
from suite.session import Plan, Session
from suite.workloads import TINY, WORKLOADS, Attention, Gemm, select


def test_the_registry_holds_what_the_bars_are_about():
    names = set(WORKLOADS)
    for dtype in ("f16", "bf16"):
        for order in ("nt", "nn"):
            assert {f"M{i}-{order}-{dtype}" for i in range(8)} <= names
            assert {f"SQ{s}-{order}-{dtype}" for s in (1024, 2048, 4096, 16384)} <= names
    assert {f"FP8-{s}-{x}" for s in (4096, 8192) for x in ("tensor", "block")} <= names
    assert {*(f"FA{i}" for i in range(5)), "FA-8k", "FA-8k-c", "FA-16k", "FA-16k-c"} <= names
    odd = select("@odd")
    assert any(w.m % 8 and w.n % 8 and w.k % 8 for w in odd)
    assert any(w.m % 64 and not (w.k % 8 or w.n % 8) for w in odd)
    assert WORKLOADS["M1-nn-f16"].flops == 2 * 4096 * 8192 * 8192
    assert WORKLOADS["FA4"].flops == 4 * 32 * 4096**2 * 128 / 2


def test_selection():
    assert [w.name for w in select("M0-nt-*, M1-nt-f16, !*-bf16")] == ["M0-nt-f16", "M1-nt-f16"]
    assert {w.kind for w in select("@FA")} == {"attention"}
    gemm, attention = select("gemm:64x4096x512:nn:bf16, attention:b2h8/4s100d64:causal")
    assert (gemm.m, gemm.n, gemm.k, gemm.trans_b, gemm.dtype, gemm.out) == (64, 4096, 512, False, "bfloat16", "bfloat16")
    assert (attention.batch, attention.heads, attention.kv, attention.seq, attention.dim) == (2, 8, 4, 100, 64)
    assert attention.causal and attention.dtype == "float16"
    with pytest.raises(ValueError, match="no workload is called 'gemm:64x64'.*gemm:MxNxK"):
        select("gemm:64x64")
    with pytest.raises(ValueError, match="no workload is called 'M9'.*@odd"):
        select("M9")
    with pytest.raises(ValueError, match="no provider is called 'cutlass'"):
        providers.names("cublas,cutlass")


@pytest.mark.parametrize("name", TINY)
def test_the_reference_agrees_with_plain_operations_and_sees_what_is_wrong(name):
    problem = problems.make(TINY[name], "cpu")
    out = plain().candidate(problem, "float32").call()
    found = problem.check(out)
    assert found.ok, found
    for spoil in (lambda t: t[..., -1].zero_(), lambda t: t[..., -1:, :].mul_(1.2), lambda t: t.copy_(problem.new_out())):
        bad = out.clone()
        spoil(bad)
        assert not problem.check(bad).ok
    assert torch.equal(problems.make(TINY[name], "cpu").tensors[next(iter(problem.tensors))].float(),
                       problem.tensors[next(iter(problem.tensors))].float())


def test_a_step_of_k_left_out_is_seen():
    for name in ("tiny-nt-f16", "tiny-fp8-block"):
        problem = problems.make(TINY[name], "cpu")
        problem.tensors["a"][:, -1] = 0
        out = plain().candidate(problem, "float32").call()
        assert not problems.make(TINY[name], "cpu").check(out).ok


def session(tmp_path, names, rounds=2, seconds=60.0, meter=None):
    record = Record(tmp_path / "r.json")
    made = [mock_providers.Mock(n) for n in names]
    return record, Session(record, made, meter or HostMeter(0.0), Plan(rounds, 0.1, 0.2, time.time() + seconds))


def test_rounds_leave_out_what_is_wrong_and_take_turns(tmp_path):
    record, s = session(tmp_path, ["good", "wrong", "failing", "picky"])
    s.run([TINY["tiny-nt-f16"], TINY["tiny-fa"]])
    gemm, attention = (Record.load(tmp_path / "r.json").data["rows"][n] for n in ("tiny-nt-f16", "tiny-fa"))
    assert {n: p["status"] for n, p in gemm["providers"].items()} == {
        "good": rec.OK, "wrong": rec.WRONG, "failing": rec.FAILED, "picky": rec.SKIPPED}
    assert gemm["providers"]["failing"]["reason"].endswith("nothing works today")
    assert gemm["providers"]["good"]["label"] in ("one", "two") and len(gemm["providers"]["good"]["tried"]) == 2
    assert [sorted(r) for r in gemm["rounds"]] == [["good"]] * 2
    assert [sorted(r) for r in attention["rounds"]] == [["good", "picky"]] * 2
    assert [next(iter(r)) for r in attention["rounds"]] == ["good", "picky"]  # who is first changes
    assert len(rec.times(attention, "picky", "burst")) == 2
    assert rec.ratio(attention, "good", "picky", "burst") > 0


def test_without_time_later_rounds_are_dropped(tmp_path):
    record, s = session(tmp_path, ["good"], rounds=3, seconds=-1.0)
    s.run([TINY["tiny-nt-f16"]])
    assert record.data["rows"]["tiny-nt-f16"]["rounds"] == []
    assert any("no time for round 1" in e for e in record.data["events"])


def test_a_record_is_continued(tmp_path):
    record, s = session(tmp_path, ["good"], rounds=1)
    s.run([TINY["tiny-nt-f16"]])
    again = Record.load(tmp_path / "r.json")
    Session(again, [mock_providers.good()], HostMeter(0.0), Plan(2, 0.1, 0.2, time.time() + 60)).run([TINY["tiny-nt-f16"]])
    assert len(again.data["rows"]["tiny-nt-f16"]["rounds"]) == 2


def test_who_stands_still_is_named(tmp_path):
    path = tmp_path / "r.json"
    record = Record(path)
    record.row(TINY["tiny-fa"])
    record.begin("burst window", "tiny-fa", "slow")
    stuck = [sys.executable, "-c", "import sys, json, time; sys.exit(0) if json.load(open(sys.argv[1]))['events'] "
             "else time.sleep(60)", str(path)]
    assert supervising.supervise(stuck, path, 1.5, time.time() + 60) == 1
    data = Record.load(path).data
    assert data["rows"]["tiny-fa"]["providers"]["slow"]["status"] == rec.CRASHED
    assert "stood still" in data["events"][0] and "burst window of tiny-fa by slow" in data["events"][0]


@pytest.mark.slow
def test_a_whole_run_survives_a_crash(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    status = peers.main(["--device", "cpu", "--workloads", "tiny-nt-f16", "--providers",
                         "torch,mock_providers:crashing,suite.provider_tilelang:on_cpu", "--rounds", "1", "--idle", "0",
                         "--burst-ms", "0.5", "--sustained-ms", "1", "--workers", "1", "--no-cold", "--out", str(tmp_path)])
    data = json.loads((tmp_path / "peers.json").read_text())
    assert status == 0, data
    for row in data["rows"].values():
        assert row["providers"]["crashing"]["status"] == rec.CRASHED
        assert row["providers"]["tilelang"]["accuracy"]["ok"] and len(row["rounds"]) == 1
        assert set(row["rounds"][0]) == {"torch", "tilelang"}
    assert [e for e in data["compile"] if e.get("seconds", 0) > 0]
    assert data["machine"]["torch"] == torch.__version__
    text = capsys.readouterr().out
    assert "crashed" in text and "tiny-nt-f16" in (tmp_path / "peers.txt").read_text()


def test_wrong_options_end_with_the_usage(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--workloads", "M99"])
    assert "no workload is called" in capsys.readouterr().err
    assert peers.main(["--list"]) == 0
    assert "M7-nt-bf16" in capsys.readouterr().out


def row_of(w, **ms):
    windows = [{p: {x: {"ms": t, "clock_mhz": 1900.0, "power_w": 600.0} for x in ("burst", "sustained")}
                for p, t in ms.items()} for _ in range(2)]
    accuracy = {"relative": 2e-4, "of_bound": 0.5, "ok": True}
    return {"shape": w.shape, "flops": w.flops, "rounds": windows,
            "providers": {p: {"status": rec.OK, "accuracy": accuracy} for p in ms}}


def test_bars_and_table():
    rows = {w.name: row_of(w, tilelang=1.0, cublas=1.02, triton=0.5) for w in select("M?-nt-f16")}
    rows["FA-16k"] = row_of(WORKLOADS["FA-16k"], tilelang=3.0, cudnn=2.5, triton=4.0)
    found = {b.text: b for b in bars.bars(rows, "burst")}
    mean = found["M0-M7 f16 NT, geometric mean over cuBLAS"]
    assert mean.ok and mean.value == pytest.approx(1.02) and mean.of == (8, 8)
    lowest = found["attention 8k and 16k, lowest over the best peer"]
    assert not lowest.ok and lowest.value == pytest.approx(2.5 / 3)
    assert found["FA-16k, TFLOP/s"].value == pytest.approx(WORKLOADS["FA-16k"].flops / 3.0 * 1e-9)
    data = {"rows": rows, "compile": [{"provider": "tilelang", "workload": "x", "label": "y", "seconds": 0.4}],
            "cold": [{"provider": "tilelang", "workload": "x", "kind": "gemm", "seconds": [0.4, 0.5], "errors": []}],
            "events": ["e"]}
    text = report.summary(data, ["tilelang", "cublas", "triton"], ["cublas", "triton"])
    assert "0.500/0.500" in text and "reached  M0-M7 f16 NT" in text and "burst 1900 MHz" in text
    assert "cold compile tilelang x: 0.40, 0.50 s, wanted at most 0.5 s: reached" in text


def test_every_configuration_is_a_program():
    for tiles in GEMM_TILES.values():
        for trans_b in (True, False):
            programs.gemm(520, 264, 136, trans_b, "float16", "float16", **tiles)
    for tiles in ATTENTION_TILES.values():
        programs.attention(1, 4, 2, 520, 128, True, "bfloat16", **tiles)


def test_jobs_are_of_those_who_compile():
    todo = compiling.jobs(["torch", "suite.provider_tilelang:on_cpu"], [TINY["tiny-nt-f16"]])
    assert [(j[0], j[1].name) for j in todo] == [("suite.provider_tilelang:on_cpu", "tiny-nt-f16")]
    assert "error" in compiling.compile_one("mock_providers:none", TINY["tiny-fa"], "x")


class FakeLibrary:
    """Records the calls of a driver library."""

    def __init__(self):
        self.maps, self.launches = [], []

    def cuTensorMapEncodeTiled(self, place, kind, rank, address, dims, strides, box, ones, *codes):
        assert place.value % 64 == 0
        self.maps.append((kind, rank, address.value, list(dims), list(strides), list(box), codes))
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        c = config._obj
        self.launches.append((list(c.grid), list(c.block), c.shared, c.count, list(c.attributes[0].value[:3]), c.stream,
                              ctypes.c_int.from_address(parameters[1]).value))
        return 0


def test_a_prebuilt_kernel_is_launched_as_its_entry_says(monkeypatch):
    a = torch.zeros(8, 64, dtype=torch.float16)
    library = FakeLibrary()
    entry = {"grid": 1000, "cluster": 2, "threads": 384, "shared_bytes": 1024, "arguments": [
        {"map": "a", "type": "float16", "dims": [64, 8], "strides": [128], "box": [64, 8], "swizzle": 128, "l2": 256},
        {"int32": 7}, {"float32": 0.5}, {"tensor": "a"}]}
    arguments = [argument(library, {"a": a}, x) for x in entry["arguments"]]
    assert library.maps == [(6, 2, a.data_ptr(), [64, 8], [128], [64, 8], (0, 3, 3, 0))]
    assert ctypes.addressof(arguments[0]) % 64 == 0 and arguments[3].value == a.data_ptr()

    class Driver:
        lib = library

        @staticmethod
        def check(rc, what):
            assert rc == 0

    class Function:
        module, handle = type("Module", (), {"driver": Driver}), 1

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 99}))
    Launch(Function, entry, arguments, sms=131)()
    assert library.launches == [([130, 1, 1], [384, 1, 1], 1024, 1, [2, 1, 1], 99, 7)]


def test_shapes_are_said():
    assert Gemm("x", (), 1, 2, 3, False, "bfloat16").shape == "1x2x3 NN bf16"
    assert Attention("x", (), 1, 8, 16, 64, True, 2).shape == "b1 h8/2 s16 d64 f16 causal"


def test_cold_compiles_find_the_bytecode_that_an_installed_package_has(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    for path in (package / "__init__.py", package / "inner" / "a.py"):
        path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    cold.write_bytecode("some_package")
    assert len(list(package.rglob("*.pyc"))) == 2
    cold.write_bytecode("no_such_package")


def test_the_library_of_another_checkout_is_another_package_beside_ours(monkeypatch):
    from suite import provider_checkout

    import tilelang

    monkeypatch.setenv(provider_checkout.VARIABLE, str(Path(__file__).parents[2]))
    other = provider_checkout.on_cpu()
    assert other.unavailable() == ""
    problem = problems.make(TINY["tiny-nt-f16"], "cpu")
    candidate = other.candidate(problem, other.labels(problem.workload)[0])
    assert problem.check(candidate.call()).ok
    assert sys.modules["tilelang"] is tilelang and other.modules["tilelang"] is not tilelang
    assert candidate.call.func is not tilelang.library.matmul
    monkeypatch.setenv(provider_checkout.VARIABLE, "")
    assert "names no folder" in provider_checkout.on_cpu().unavailable()
