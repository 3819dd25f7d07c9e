"""Kernels whose source stands in no file: on the command line, on stdin, in a string, typed at a prompt."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import numpy as np
import tilelang
import tilelang.language as T

@tilelang.jit(target="cpu")
def double(X):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, 32), threads=32) as b:
        for i in T.Parallel(32):
            Y[b * 32 + i] = X[b * 32 + i] * 2
    return Y
"""
RUN = "x = np.arange(50, dtype=np.float32)\nprint((np.from_dlpack(double(x)) == 2 * x).all())\n"
WRONG = PROGRAM.replace("* 2", "* (2, 3)")


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, **options)


def test_a_kernel_on_the_command_line_had_no_source():
    out = python("-c", PROGRAM + RUN)
    assert out.stdout == "True\n", out.stderr
    out = python("-c", WRONG + RUN)
    assert "Y[b * 32 + i] = X[b * 32 + i] * (2, 3)" in out.stderr and "^^^" in out.stderr


def test_a_kernel_on_stdin_had_no_source(tmp_path):
    script = tmp_path / "script"
    script.write_text(PROGRAM + RUN)
    with open(script) as stdin:
        out = python("-", stdin=stdin)
    assert out.stdout == "True\n", out.stderr


def test_a_kernel_from_a_pipe_names_what_to_do():
    out = python("-", input=PROGRAM + RUN)
    assert "source-unavailable" in out.stderr and "from a pipe: save it and run `python FILE`" in out.stderr


def test_a_kernel_from_a_string():
    double = tilelang.from_source(PROGRAM)
    x = np.arange(50, dtype=np.float32)
    assert (np.from_dlpack(double(x)) == 2 * x).all()
    other = tilelang.from_source(PROGRAM.replace("* 2", "* factor"), "double", factor=3)
    assert (np.from_dlpack(other(x)) == 3 * x).all() and (np.from_dlpack(double(x)) == 2 * x).all()
    with pytest.raises(TypeError) as e:
        tilelang.from_source(WRONG)(x)
    assert "<tilelang source" in str(e.value) and "X[b * 32 + i] * (2, 3)" in str(e.value)
    with pytest.raises(ValueError, match="the text defines no `missing`"):
        tilelang.from_source(PROGRAM, "missing")


PROMPT = """
import readline, sys
lines = {lines!r}
for line in lines:
    readline.add_history(line)
namespace = {{}}
exec("import tilelang\\nimport tilelang.language as T", namespace)
exec(compile("\\n".join(lines) + "\\n", "<stdin>", "single"), namespace)
import numpy as np
x = np.arange(50, dtype=np.float32)
print((np.from_dlpack(namespace["double"](x)) == 2 * x).all())
"""


def test_a_kernel_typed_at_the_prompt_had_no_source():
    pytest.importorskip("readline")
    typed = PROGRAM.strip().splitlines()[4:]
    out = python("-c", PROMPT.format(lines=typed))
    assert out.stdout == "True\n", out.stderr
