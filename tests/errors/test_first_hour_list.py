"""Typical mistakes of a first hour: each names its kind, its place in the program and what to write instead.

The files first_hour/*.txt hold one mistake a section:

    === what is wrong
    kind of the error (or: warning CODE, or a built-in exception) | text under the caret | phrase of the hint
    the program

Programs of kernels.txt are the body of a kernel function, those of statements.txt and tiles.txt stand inside T.Kernel, the
others are whole; calls.txt has kernels that are compiled once.  commands.txt holds command lines and what they print.
"""

import functools
import linecache
import pathlib
import re
import shlex
import warnings

import pytest

from tilelang import cli
from tilelang.errors import TileLangError, TileLangWarning
from tilelang.jit.inspect import sources_of

FOLDER = pathlib.Path(__file__).with_name("first_hour")
IMPORTS = "import math\nimport numpy as np\nimport tilelang\nimport tilelang.language as T\n"
TWICE = '''
@T.prim_func
def TWICE(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            Y[i] = X[i] * 2
'''
FRAME = '''
@T.prim_func
def program(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32"), A: T.Tensor((64, 64), "float16"),
            B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32"), I: T.Tensor((256,), "int32"), n: T.int32):
'''
COMPILED = TWICE + '''
m = T.dynamic("m")

@T.prim_func
def SCALE(X: T.Tensor((4, 8), "float32"), n: T.int32):
    with T.Kernel(1, threads=32):
        for i, j in T.Parallel(4, 8):
            X[i, j] = X[i, j] * n

@T.prim_func
def DYNAMIC(X: T.Tensor((m,), "float32"), Y: T.Tensor((m,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(m):
            Y[i] = X[i]

@T.prim_func
def POSITIVE(X: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            assert X[i] > 0, "positive values only"
            X[i] = 1.0

@T.prim_func
def HALF(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(32):
            Y[i] = X[i]

@tilelang.jit(target="cpu")
def twice(X):
    M = T.const("M")
    X: T.Tensor((M,), "float32")
    Y = T.empty((M,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(M):
            Y[i] = X[i] * 2
    return Y

@tilelang.jit(target="cpu")
def plus(X, Y):
    M = T.const("M")
    X: T.Tensor((M,), "float32")
    Y: T.Tensor((M,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(M):
            Y[i] = X[i] + Y[i]

kernel, scale, dynamic, positive = (tilelang.compile(p, target="cpu") for p in (TWICE, SCALE, DYNAMIC, POSITIVE))
made = tilelang.compile(TWICE, target="cpu", out_idx=-1)
'''


def rows(name):
    """(what is expected, program) of each section of a file, named after what is wrong."""
    out = []
    for section in re.split(r"^=== ", (FOLDER / f"{name}.txt").read_text(encoding="utf-8"), flags=re.M)[1:]:
        title, expected, program = section.split("\n", 2)
        out.append(pytest.param(expected.split(" | "), program, id=title))
    return out


def run(text, name, space):
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), space)
    return space


@functools.cache
def compiled():
    return run(IMPORTS + COMPILED, "<compiled>", {"__name__": "first_hour"})


def text_under_caret(shown):
    """The source text that the first caret line of an error's text marks; "" where the source is not known."""
    lines = shown.split("\n")
    at = next(k for k, x in enumerate(lines) if x.startswith("  --> "))
    marks = re.match(r" *\| *(\^+)", lines[at + 2])
    return lines[at + 1][slice(*marks.span(1))] if marks else ""


def check(expected, act):
    """Run a mistake and compare what the user is told."""
    kind, place, hint = expected
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            act()
            error = None
        except Exception as e:
            error = e
    if kind.startswith("warning "):
        assert error is None, error
        found = [w for w in told if issubclass(w.category, TileLangWarning) and w.message.code == kind.removeprefix("warning ")]
        assert found, [str(w.message) for w in told]
        assert place in linecache.getline(found[0].filename, found[0].lineno) and hint in str(found[0].message)
    elif isinstance(error, TileLangError):
        shown = str(error)
        assert error.kind == kind and error.expected and error.found, shown
        assert text_under_caret(shown) in place.split(" or ") and hint in error.hint, shown
    else:
        assert type(error).__name__ == kind and hint in str(error), repr(error)


def test_the_list_is_long():
    assert sum(1 for f in FOLDER.glob("*.txt") for _ in rows(f.stem)) >= 130


@pytest.mark.parametrize("expected, program", rows("kernels"))
def test_a_kernel(expected, program):
    traced(expected, "".join(f"    {line}\n" for line in program.splitlines()))


@pytest.mark.parametrize("expected, program", [*rows("statements"), *rows("tiles")])
def test_a_statement(expected, program):
    body = "".join(f"        {line}\n" for line in program.splitlines())
    traced(expected, f"    with T.Kernel(2, threads=64) as bx:\n{body}")


def traced(expected, body):
    check(expected, lambda: sources_of(run(IMPORTS + FRAME + body, "<mistake>", {"__name__": "first_hour"})["program"],
                                       {"kind": "cuda", "arch": "sm_90a"}))


@pytest.mark.parametrize("expected, program", rows("functions"))
def test_a_function(expected, program):
    check(expected, lambda: run(IMPORTS + TWICE + program, "<mistake>", {"__name__": "first_hour"}))


@pytest.mark.parametrize("expected, program", rows("calls"))
def test_a_call(expected, program):
    head = 'x, y = np.ones(64, "float32"), np.zeros(64, "float32")\n'
    check(expected, lambda: run(head + program, "<call>", dict(compiled())))


@pytest.mark.parametrize("expected, program", rows("commands"))
def test_a_command(expected, program, tmp_path, monkeypatch, capsys):
    command, _, file = program.partition("\n")
    if file:
        (tmp_path / "my.py").write_text(IMPORTS + file, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(shlex.split(command))
    except SystemExit as e:
        code = e.code
    told = capsys.readouterr().err
    assert code == int(expected[0]) and all(x in told for x in expected[1:]) and "Traceback" not in told, told
