"""Programs of numbers mean what Python makes of their text: types, conversions and arithmetic, judged without the compiler."""

import pytest
from backends import AGREES, _execute, compare, inputs, load
from gen_program import make_program
from gen_text import source
from plain_python import run


def check(path, seed):
    path.write_text(source(make_program(seed, "bits")))
    m = load(path)
    args = inputs(m.SEED, m.TENSORS)
    found = _execute("tile", m.program.func, m.program, args, m.TENSORS, m.CONFIGS, [False])
    outcome = compare(m.TENSORS, run(path, args), found)
    assert outcome.status == AGREES, f"seed {seed}: {outcome.text}\n{path.read_text()}"


def test_python_finds_what_the_tile_meaning_finds(tmp_path):
    for seed in range(30):
        check(tmp_path / f"p{seed}.py", seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_python_finds_what_the_tile_meaning_finds_in_many_programs(tmp_path):
    for seed in range(1000, 2000):
        check(tmp_path / f"p{seed}.py", seed)


def test_python_is_a_judge(tmp_path):
    """It does not agree with a tile meaning that is told other inputs."""
    path = tmp_path / "p.py"
    path.write_text(source(make_program(1, "bits")))
    m = load(path)
    args = inputs(m.SEED, m.TENSORS)
    found = _execute("tile", m.program.func, m.program, args, m.TENSORS, m.CONFIGS, [False])
    assert compare(m.TENSORS, run(path, inputs(m.SEED + 1, m.TENSORS)), found).status != AGREES
