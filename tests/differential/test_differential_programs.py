"""Generated whole programs agree between tile meaning, device simulator, CPU and (with one at hand) the GPU."""

import json

import numpy as np
import pytest
from backends import run
from gen_program import PROFILES, make_program
from gen_text import features, source
from run import FEW, coverage, executions_of, main, program_seed, status_of, summary
from shrinking import shrink

CHUNKS, PROGRAMS = 6, 10


def check(tmp_path, seed, executions=None):
    path = tmp_path / f"p{seed}.py"
    path.write_text(source(make_program(seed)))
    result = run(path, executions or executions_of(seed))
    assert not result.failed, f"seed {seed}: {result.plain()}\n{path.read_text()}"
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_of_a_fixed_seed_agree(chunk, tmp_path):
    results = [check(tmp_path, program_seed(11, chunk * PROGRAMS + i)) for i in range(PROGRAMS)]
    agreeing = [r for r in results if status_of(r.plain()) == "agrees"]
    assert len(agreeing) >= PROGRAMS * 0.6, [r.plain() for r in results]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS // 2))
def test_programs_of_a_fresh_seed_agree(chunk, tmp_path):
    seed = int(np.random.default_rng().integers(1000, 2**31))
    print(f"seed {seed}")
    for i in range(PROGRAMS):
        check(tmp_path, program_seed(seed, i))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS // 2))
def test_programs_agree_on_waves_of_64_lanes(chunk, tmp_path):
    seeds = [program_seed(13, chunk * PROGRAMS + i) for i in range(PROGRAMS)]
    results = [check(tmp_path, s, executions_of(s, backend="hip")) for s in seeds]
    assert sum(status_of(r.plain()) == "agrees" for r in results) >= PROGRAMS * 0.6, [r.plain() for r in results]


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_agree_on_the_device(chunk, tmp_path):
    for i in range(PROGRAMS):
        check(tmp_path, program_seed(12, chunk * PROGRAMS + i), ("tile", "cuda"))


def test_the_same_seed_writes_the_same_program():
    for seed in range(40):
        assert source(make_program(seed)) == source(make_program(seed))
        assert json.loads(json.dumps(make_program(seed))) == make_program(seed)


def test_programs_cover_the_language():
    """Every statement kind, loop, pair of scopes and dtype comes up in a thousand programs, none as a rare chance."""
    drawn = [features(make_program(program_seed(3, seed))) for seed in range(1000)]
    assert {f: n for f, n in coverage(drawn).items() if n < FEW // 6} == {}
    found = {f for fs in drawn for f in fs}
    scopes = ("global", "shared", "fragment")
    expected = """loop:T.serial loop:T.unroll loop:T.Pipelined loop:while loop:T.grid loop:T.Persistent loop:ordered loop:break
        loop:continue loop:down loop:step loop:runtime stages:0 stages:4 branch:else scalar:assign scalar:let gemm:ss:NN
        gemm:ss:TT gemm:fs:NN scan:cumsum reduce:absmax reduce:bitxor atomic:add:int32 atomic:tile-add:float32
        atomic:shared-add:int32 view:bits view:shared transpose macro reducer:sum shape:dynamic kernels:2 return threads:odd
        thread:shuffle thread:stride thread:barrier-in-if parallel:inner-loop parallel:two-stores parallel:spread-sum
        index:outside index:negative copy:async use_swizzle""".split()
    for f in (*expected, *(f"copy:{a}->{b}" for a in scopes for b in scopes)):
        assert f in found, f
    assert {p.name for p in PROFILES} <= {make_program(seed)["profile"] for seed in range(100)}


def test_a_run_leaves_one_summary(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", f"run.py --programs 3 --seed 4 -n 2 --only --out {tmp_path}".split())
    assert main() == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["programs"], found["status"], found["executions"]) == (3, {"agrees": 3}, {"tile": {"agrees": 3}})
    assert found["disagreements"] == [] and found["seconds"] >= 0 and "grid:2d" in found["features"]
    row = {"seed": 7, "status": "failed", "features": ["return"],
           "outcomes": {"cpu": {"status": "failed", "kind": "mismatch", "text": "O0"}}}
    assert summary([row])["disagreements"] == [{"seed": 7, "execution": "cpu", "kind": "mismatch", "text": "O0"}]
    assert "return" not in summary([row])["seldom drawn"] and "atomic:or" in summary([row])["seldom drawn"]


def test_executions_of_a_run():
    assert executions_of(0) == ("tile", "sm_80", "cpu") and executions_of(0, gpu=True) == ("tile", "sm_80", "cpu", "cuda")
    assert executions_of(7) == ("tile", "sm_90a", "cpu")  # a program for Hopper
    assert executions_of(0, cubin=True, only=True) == ("tile", "cubin")
    assert executions_of(2, gpu=True, backend="hip", chip="gfx942") == ("tile", "gfx942", "hip")
    assert executions_of(2, gpu=True, only=True, backend="hip") == ("tile", "hip")


def test_a_failing_program_is_cut_down():
    program = make_program(7)

    def fails(p):
        text = source(p)
        try:
            compile(text, "program", "exec")
        except SyntaxError:
            return False
        return "T.Pipelined" in text

    seed = next(s for s in range(100) if fails(make_program(s)))
    program = make_program(seed)
    small = shrink(program, fails, 300)
    assert fails(small) and len(source(small)) < len(source(program)) / 2
