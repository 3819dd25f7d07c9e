"""Type stubs: they hold the names that exist, and type checkers accept programs with them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tilelang.language as T

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "reference"))
stubs = importlib.import_module("stubs")

PROGRAM = '''
import tilelang
import tilelang.language as T
from tilelang.library import matmul


@tilelang.jit
def scale(A, factor: float = 2.0):
    M, N = T.const("M N")
    A: T.Tensor((M, N), "float16")
    B = T.empty((M, N), T.float32)
    with T.Kernel(T.ceildiv(M, 64), T.ceildiv(N, 64), threads=128) as (bx, by):
        for i, j in T.Parallel(64, 64):
            B[bx * 64 + i, by * 64 + j] = T.exp(A[bx * 64 + i, by * 64 + j]) * factor
    return B


kernel: tilelang.JITKernel = scale.compile(M=64, N=64)
best = tilelang.autotune(configs=[{"factor": 1.0}])(scale)
matmul(1, 2, transpose_b=True)
'''
FAULTS = {"T.gem(1)": "gem", "T.copy(1)": "dst", "tilelang.autotun(1)": "autotun", "tilelang.jit(out=1)": "jit",
          "kernel.get_kernel_sourc()": "get_kernel_sourc", "matmul(1)": "b"}


def test_the_stubs_are_those_that_the_package_gives():
    old = [p.name for p, text in stubs.stubs().items() if p.read_text(encoding="utf-8") != text]
    assert not old, "run python docs/reference/stubs.py"


def test_every_public_name_stands_in_the_stub_of_the_language():
    text = (ROOT / "tilelang" / "language" / "__init__.pyi").read_text(encoding="utf-8")
    words = set(text.replace(":", " ").replace("(", " ").replace(",", " ").split())
    assert not [n for n in T.__all__ if n not in words]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Errors that mypy reports for PROGRAM and, below it, each of FAULTS."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("typed")
    file = folder / "program.py"
    file.write_text(PROGRAM + "\n" + "\n".join(FAULTS) + "\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", str(ROOT / "examples" / "mypy.ini"),
                           "--check-untyped-defs", "--cache-dir", str(folder / "cache"), str(file)],
                          cwd=folder, env={"MYPYPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_mypy_finds_no_fault_in_a_program_and_every_misspelt_name_below_it(checked):
    last = len(PROGRAM.splitlines())
    lines = {int(line.split(":")[1]): line for line in checked}
    assert not [line for at, line in lines.items() if at <= last], "\n".join(checked)
    for k, (fault, word) in enumerate(FAULTS.items()):
        assert word in lines.get(last + 2 + k, ""), (fault, checked)
