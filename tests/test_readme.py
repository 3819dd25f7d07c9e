"""The first program of the README is a kernel of at most 20 lines, one statement a line, and computes what it says."""

import pathlib
import re
import runpy

import numpy as np
import selection

README = (pathlib.Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_kernel_runs(tmp_path):
    assert README.splitlines().index("```python") < 6
    block = README.split("```python\n", 1)[1].split("```", 1)[0]
    assert len(block[block.index("@tilelang.jit"):].splitlines()) <= 20 and ";" not in block
    path = tmp_path / "readme_kernel.py"
    path.write_text(block, encoding="utf-8")
    matmul = runpy.run_path(str(path))["matmul"]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((200, 72), (72, 130)))
    got = matmul(a, b)
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert got.dtype == np.float16 and got.shape == (200, 130)
    assert np.abs(got - want).max() <= 2**-11 * np.abs(want).max() + 1e-3


def test_the_oldest_gpu_is_the_same_everywhere():
    docs = pathlib.Path(__file__).resolve().parent.parent / "docs"
    said = [re.search(pattern, text)[1] for text, pattern in (
        (README, r"(sm_\d+) or newer and a driver"),
        ((docs / "index.md").read_text(encoding="utf-8"), r"NVIDIA GPUs from `(sm_\d+)` on"),
        ((docs / "guide" / "install.md").read_text(encoding="utf-8"), r"NVIDIA GPU from \w+ \(`(sm_\d+)`\) on"),
        ((docs / "guide" / "from-upstream.md").read_text(encoding="utf-8"), r"CUDA from `(sm_\d+)` on"))]
    assert set(said) == {"sm_75"}


def test_the_two_commands_stand_in_the_readme():
    assert "pip install . && python -m tilelang demo" in README
    assert "pip install '.[test]' && python -m pytest" in README


def test_the_second_command_needs_no_torch():
    """A module that imports torch, or a helper that does, when it is loaded stands in tests/skips.txt."""
    tests = pathlib.Path(__file__).resolve().parent
    texts = {p: p.read_text(encoding="utf-8") for p in tests.rglob("*.py") if "programs" != p.parent.name}
    line = r'^(?:(?:import|from) {0}\b|(?:torch = )?pytest\.importorskip\("torch"\))'
    helpers = {p.stem for p, text in texts.items()
               if re.search(line.format("torch"), text, re.MULTILINE) and not p.name.startswith("test_")}
    reached = re.compile(line.format(f"(?:torch|{'|'.join(sorted(helpers))})"), re.MULTILINE)
    found = {p.relative_to(tests.parent).as_posix() for p, text in texts.items()
             if p.name.startswith("test_") and reached.search(text)}
    named = {name for name, need in selection.listed().items() if need == "torch" and "::" not in name}
    assert found == named


def test_what_may_be_skipped_exists():
    root = pathlib.Path(__file__).resolve().parent.parent
    for name, need in selection.listed().items():
        file, _, test = selection.function_of(name).partition("::")
        assert need in selection.MISSING and (root / file).exists(), name
        assert not test or f"def {test}(" in (root / file).read_text(encoding="utf-8"), name
