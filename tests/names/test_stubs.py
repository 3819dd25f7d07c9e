"""Type stubs: they hold the names that exist, and type checkers accept programs with them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilelang.language as T

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "reference"))
stubs = importlib.import_module("stubs")

PROGRAM = '''
import numpy as np
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
        reveal_type((bx, i))
        for k in T.Pipelined(4, num_stages=2):
            reveal_type(k)
        for k2 in T.serial(4):
            reveal_type(k2)
        for a, b, c in T.grid(2, 2, 2):
            reveal_type(c)
    with T.Kernel(4) as one:
        reveal_type(one)
    return B


@tilelang.jit(out_idx=[-1])
def make(n: int, dtype: str = "float32") -> T.PrimFunc:
    @T.prim_func
    def main(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
        with T.Kernel(1):
            T.copy(A, B)
    reveal_type(main)
    return main


@tilelang.jit
def typed(x: np.ndarray, n: int = 3) -> list[str]:
    raise NotImplementedError


x = np.zeros(3)
reveal_type(scale(x, factor=3.0))
reveal_type(make(3))
reveal_type(make(3)(x))
reveal_type(typed(x))
reveal_type(scale(x, out=x))
np.sum(scale(x))
kernel: tilelang.JITKernel = scale.compile(M=64, N=64)
best = tilelang.autotune(configs=[{"factor": 1.0}])(scale)
matmul(1, 2, transpose_b=True)
'''
FAULTS = {"T.gem(1)": "gem", "T.copy(1)": "dst", "tilelang.autotun(1)": "autotun", "tilelang.jit(out=1)": "jit",
          "kernel.get_kernel_sourc()": "get_kernel_sourc", "matmul(1)": "b",
          "scale(x, factr=3)": "JITImpl", "make('3')": "JITImpl", "typed(3)": "JITImpl"}
REVEALED = ["tuple[Var, Var]", "Var", "Var", "Var", "Var", "PrimFunc", "Output", "JITKernel", "Output", "list[str]", "Output"]


def test_the_stubs_are_those_that_the_package_gives():
    old = [p.name for p, text in stubs.stubs().items() if p.read_text(encoding="utf-8") != text]
    assert not old, "run python docs/reference/stubs.py"


def test_every_public_name_stands_in_the_stub_of_the_language():
    text = (ROOT / "tilelang" / "language" / "__init__.pyi").read_text(encoding="utf-8")
    words = set(text.replace(":", " ").replace("(", " ").replace(",", " ").split())
    for module in re.findall(r"^from (\S+) import \*$", text, re.MULTILINE):  # checkers read the list in the module's source
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        (listed,) = re.findall(r"^__all__ = (\[[^]]*\])$", source, re.MULTILINE)
        words |= set(ast.literal_eval(listed))
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
    return [line for line in done.stdout.splitlines() if ": error:" in line or "Revealed type" in line]


def test_mypy_finds_no_fault_in_a_program_and_every_misspelt_name_below_it(checked):
    last = len(PROGRAM.splitlines())
    lines = {int(line.split(":")[1]): line for line in checked if ": error:" in line}
    assert not [line for at, line in lines.items() if at <= last], "\n".join(checked)
    for k, (fault, word) in enumerate(FAULTS.items()):
        assert word in lines.get(last + 2 + k, ""), (fault, checked)


def test_loop_variables_block_indices_and_results_were_any(checked):
    said = [re.sub(r"\b[a-z_]+\.|builtins\.", "", line.split('"')[1]) for line in checked if "Revealed type" in line]
    assert said == REVEALED
