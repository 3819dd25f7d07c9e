"""Puzzles: solutions pass, every planted mistake is found and named, no file of a learner ends in a trace."""

import importlib.util
import json
import re
from xml.etree import ElementTree

import pytest

from solved_from_the_text import FIRST
import tilelang.language as T
from tilelang import cli
from tilelang.tools.puzzles import check_file, picture, puzzle, puzzles
from tilelang.tools.puzzles.book import learners_file
from tilelang.tools.puzzles.checking import checked
from tilelang.tools.puzzles.notebook import notebook_text, picture_of
from wrong_solutions import WRONG

HEAD = "import tilelang\nimport tilelang.language as T\n"
NAMES = [p.function for p in puzzles()]


def verdict(tmp_path, name, code):
    path = tmp_path / "learner.py"
    path.write_text(code, encoding="utf-8")
    return checked(str(path), name)


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes_and_the_start_does_not(tmp_path, name):
    p = puzzle(name)
    assert verdict(tmp_path, name, p.solution[1]).ok
    unsolved = verdict(tmp_path, name, p.source)
    assert not unsolved.ok and unsolved.rule and "Traceback" not in str(unsolved)
    assert len(p.hints) >= 2 and p.statement and len(p.solution[0]) > 40


@pytest.mark.core
@pytest.mark.parametrize("name, mistake", [(n, m) for n, wrong in WRONG.items() for m in wrong])
def test_a_planted_mistake_is_found(tmp_path, name, mistake):
    old, new, says = WRONG[name][mistake]
    code = puzzle(name).solution[1]
    assert old in code
    v = verdict(tmp_path, name, code.replace(old, new))
    assert not v.ok and says in str(v), str(v)


def test_each_puzzle_has_planted_mistakes():
    assert list(WRONG) == NAMES and len(NAMES) >= 12 and min(map(len, WRONG.values())) >= 4


@pytest.mark.parametrize("name", FIRST)
def test_solutions_written_from_the_text_alone_pass(tmp_path, name):
    assert verdict(tmp_path, name, HEAD + FIRST[name]).ok


COPY = FIRST["copy"]
UNFINISHED = {
    "nothing": ("", "has no function `copy`"),
    "no Python": ("def copy(A:\n", "learner.py:1: "),
    "no decorator": (COPY.replace("@tilelang.jit", ""), "put @tilelang.jit above its def"),
    "an ellipsis": (COPY.replace("T.copy(A[first], tile)", "..."), "rule: read before written"),
    "an unknown name": (COPY.replace("bx * 128", "bx * SIZE"), "SIZE"),
    "an error of NumPy": (HEAD + "import numpy as np\nnp.zeros(3) @ np.zeros(4)\n", "learner.py:4: ValueError"),
    "an error of NumPy in the kernel": (COPY.replace("first = bx * 128", "first = np.zeros(3) @ np.zeros(4)")
                                        .replace("@tilelang", "import numpy as np\n@tilelang"), "learner.py"),
    "no result": (COPY.replace("    return B", ""), "rule: "),
    "another result": (COPY.replace("return B", "return 1"), "rule: "),
    "two inputs": (COPY.replace("(A)", "(A, X)").replace("    B =", '    X: T.Tensor((N,), "int32")\n    B ='), "3 tensors"),
    "another shape": (COPY.replace('B = T.empty((N,)', 'B = T.empty((N + 1,)'), "expected (256,)"),
    "another dimension": (COPY.replace('T.const("N")', 'T.const("L")'), "rule: "),
    "a typo in T": (COPY.replace("T.alloc_shared", "T.aloc_shared"), "aloc_shared"),
    "a division by 0": (COPY.replace("T.ceildiv(N, 128)", "1 // 0"), "ZeroDivisionError"),
    "an exit": (HEAD + "raise SystemExit(3)\n", "SystemExit"),
    "a recursion": (HEAD + "def f():\n    return f()\nf()\n", "RecursionError"),
    "a kernel that calls itself": (COPY.replace("T.copy(tile, B[first])", "copy(A)"), "rule: "),
    "a string": (HEAD + "copy = 'copy'\n", "put @tilelang.jit above its def"),
}


@pytest.mark.core
@pytest.mark.parametrize("what", UNFINISHED)
def test_an_unfinished_file_ended_in_a_trace_of_another_library(tmp_path, what):
    code, says = UNFINISHED[what]
    v = verdict(tmp_path, "copy", code if code.startswith("import") or what in ("nothing", "no Python") else HEAD + code)
    assert not v.ok and says in str(v), str(v)
    assert "Traceback" not in str(v) and "site-packages" not in str(v)


def test_a_file_that_hangs_or_ends_python_is_reported(tmp_path, capfd):
    path = tmp_path / "learner.py"
    assert "does not exist" in check_file(path, "copy").text
    path.write_text("print('so far')\nwhile True:\n    pass\n", encoding="utf-8")
    assert check_file(path, "copy", seconds=3).rule == "time"
    path.write_text("raise KeyboardInterrupt\n", encoding="utf-8")
    assert "raises KeyboardInterrupt" in check_file(path, "copy").text and "Traceback" not in capfd.readouterr().err
    path.write_text("import os\nos._exit(7)\n", encoding="utf-8")
    assert "exit status 7" in check_file(path, "copy").text


def test_the_command_keeps_progress(tmp_path, capsys):
    def run(*words):
        code = cli.main(["puzzles", *words, "--dir", str(tmp_path / "desk")])
        return code, capsys.readouterr().out

    assert run("start")[0] == 0
    mine = tmp_path / "desk" / learners_file(puzzle("1"))
    mine.write_text(HEAD + FIRST["copy"], encoding="utf-8")
    assert "written" not in run("start")[1] and mine.read_text(encoding="utf-8").endswith("return B\n")
    assert [run("hint", "1")[1].count("hint ") for _ in range(3)] == [1, 2, 2]
    code, out = run("check")
    assert code == 0 and "solved" in out and "Next: puzzle 2" in out
    assert "[x]  1." in run()[1] and "1 of 13 solved" in run()[1]
    assert "2. Add" in run("show")[1] and "@tilelang.jit" in run("solution", "2")[1]
    (tmp_path / "desk" / "progress.json").write_text("{", encoding="utf-8")
    assert "0 of 13 solved" in run()[1]
    assert cli.main(["puzzles", "check", "77", "--dir", str(tmp_path)]) == 2 and "13 (stream)" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_shows_each_step(name):
    svg = picture_of(puzzle(name))
    root = ElementTree.fromstring(svg)
    texts = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(t in ("global memory", "shared memory", "registers") for t in texts) == 3
    assert 'marker-end="url(#a)"' in svg and "#f97316" in svg  # arrows, and the block's tile


@T.prim_func
def gather(I: T.Tensor((64,), "int32"), X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            Y[i] = X[I[i]]


def test_a_picture_leaves_out_tiles_at_addresses_that_are_data():
    assert picture(gather).startswith("<svg")


@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
                    reason="nbclient or ipykernel is not installed")
def test_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    book, solved = (nbformat.reads(notebook_text(s), as_version=4) for s in (False, True))
    nbformat.validate(book)
    for cell in solved.cells:
        cell.id = f"solved-{cell.id}"
    book.cells += [c for c in solved.cells if "program-" in c.id]  # one process runs both
    NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = {c.id: json.dumps(c.get("outputs", [])) for c in book.cells}
    programs = [i for i in said if "program-" in i]
    assert len(programs) == 2 * len(NAMES)
    assert [i for i in programs if (": solved." in said[i]) != i.startswith("solved-")] == []
    assert not any(o.output_type == "error" for c in book.cells for o in c.get("outputs", []))
    assert sum("image/svg+xml" in s for s in said.values()) == len(NAMES)


def test_texts_name_what_the_language_has():
    for p in puzzles():
        for name in re.findall(r"\bT\.(\w+)", p.source + p.solution[1] + "".join(p.hints)):
            assert hasattr(T, name), f"puzzle {p.number} names T.{name}"
