"""Delta debugging of scripts: what goes, what is kept, the command, both ways of running candidates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilelang.autodd import __freeze__, reduce_source
from tilelang.autodd.main import main
from tilelang.tools.autodd.main import Runs

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.spec("R13:autodd")


def shows(*words):
    return lambda text: all(w in text for w in words)


def test_what_the_failure_does_not_need_goes():
    source = '''import os, sys

@decorated
def used(a, b=2, *, c: int = 3) -> int:
    """Doc."""
    if a:
        x = fail(1024, key=a + b)
    else:
        x = 3
    return x

class Other:
    y = [1, 2, {"a": 3}]

for i in range(10):
    try:
        print(used(i) if i else None)
    finally:
        pass
'''
    small = reduce_source(source, shows("fail("))
    assert small.strip() == "fail()"
    assert reduce_source("x = 5  # autodd: freeze\nfail()\n", shows("fail")) != reduce_source("x = 5\nfail()\n", shows("fail"))
    # several at once find a reduction too, and nothing is run twice
    seen = []

    def check(text):
        seen.append(text)
        return "fail(" in text

    assert reduce_source(source, check, jobs=3).strip() == "fail()"
    assert len(seen) == len(set(seen))
    assert reduce_source("x = f(a and b, 64, [1, 2])\n", shows("f(", "2")).strip() in ("f(2)", "f([2])")


def test_candidates_are_programs_and_improvements_come_in_order():
    found = []
    text = reduce_source("def f():\n    a = 1\n    b = 2\nfail = f\n", shows("def f"), improved=found.append)
    assert text == "def f():\n    pass\n" == found[-1]
    assert all(len(a) >= len(b) for a, b in zip(found, found[1:]))
    for t in found:
        compile(t, "t", "exec")
    with pytest.raises(ValueError, match="does not show the failure"):
        reduce_source("x = 1\n", shows("fail"))
    with pytest.raises(SyntaxError):
        reduce_source("x = (\n", shows("x"))


@pytest.mark.parametrize("source,kept", [
    ("a = 1\nb = [2, 3]  # autodd: freeze\nfail()\n", "b = [2, 3]"),
    ("# autodd: freeze-start\na = 1\nb = g(2)\n# autodd: end-freeze\nc = 3\nfail()\n", "a = 1\nb = g(2)"),
    ("from tilelang.autodd import __freeze__\nwith __freeze__:\n    a = 1\nb = 2\nfail()\n", "with __freeze__:\n    a = 1"),
    ("x = __freeze__(g(1, 2)) + 3\nfail()\n", "__freeze__(g(1, 2))"),
    ("def f(x):\n    if x:\n        a = 1\n        b = 2  # autodd: freeze\nfail()\n", "b = 2")])
def test_what_is_frozen_stays(source, kept):
    small = reduce_source(source, shows("fail"))
    assert kept in small and "c = 3" not in small and "a = 1\n        b" not in small
    assert len(small) < len(source)


@pytest.mark.parametrize("source,words", [
    ("# autodd: freeze-start\nx = 1\n", "line 1: a freeze-start without an end-freeze"),
    ("x = 1\n# autodd: end-freeze\n", "line 2: an end-freeze without"),
    ("# autodd: freeze-start\n# autodd: freeze-start\nx = 1\n", "line 2: a freeze-start within the one of line 1")])
def test_marks_that_do_not_pair_up_are_told(source, words):
    with pytest.raises(ValueError, match=words):
        reduce_source(source, shows("x"))


def test_freezing_changes_nothing_when_it_runs():
    with __freeze__ as outer, __freeze__() as inner:
        assert outer is inner is __freeze__
    assert __freeze__(5) == 5 and __freeze__([1]) == [1]


SCRIPT = '''import helper_beside
import os
ballast = [k * k for k in range(100)]
def work(n):
    total = 0
    for k in range(n):
        total += k
    raise RuntimeError(f"the %s is {total >= 0}" % helper_beside.what)
print("begin")
if __name__ == "__main__":
    work(3)
'''


@pytest.mark.parametrize("backend", ("runner", "subproc"))
def test_the_command_reduces_a_script(tmp_path, backend, capfd):
    (tmp_path / "helper_beside.py").write_text("what = 'answer'\n")
    (tmp_path / "fails.py").write_text(SCRIPT)
    out = tmp_path / "small" / "out.py"
    code = main([str(tmp_path / "fails.py"), "--err-msg", "RuntimeError: the answer is", "-o", str(out), "--backend", backend,
                 "-j", "2", "--timeout", "30"])
    assert code == 0
    text = out.read_text()
    assert "raise RuntimeError" in text and "helper_beside.what" in text
    assert not any(w in text for w in ("ballast", "begin", "total += k", "import os"))
    said = capfd.readouterr().out
    assert f"of {len(SCRIPT.splitlines())} lines" in said and not list(out.parent.glob("*.part"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(out)], capture_output=True, text=True, env=environment)
    assert "RuntimeError: the answer is" in done.stderr


def test_a_script_that_does_not_fail_so_is_refused(tmp_path, capfd):
    (tmp_path / "fine.py").write_text("print('all good')\n")
    out = tmp_path / "out.py"
    assert main([str(tmp_path / "fine.py"), "--err-msg", "boom", "-o", str(out), "--backend", "subproc"]) == 1
    assert "does not contain 'boom'" in (err := capfd.readouterr().err) and "all good" in err and not out.exists()
    assert main([str(tmp_path / "none.py"), "--err-msg", "boom", "-o", str(out)]) == 2
    (tmp_path / "bad.py").write_text("x = (\n")
    assert main([str(tmp_path / "bad.py"), "--err-msg", "SyntaxError", "-o", str(out), "--backend", "subproc"]) == 2


@pytest.mark.parametrize("backend", ("runner", "subproc"))
def test_a_run_that_hangs_is_ended(tmp_path, backend):
    with Runs(backend, 3.0, str(tmp_path)) as runs:
        text = runs.output("import time\nprint('before', flush=True)\ntime.sleep(60)\nprint('after')\n")
        assert "before" in text and "after" not in text
        assert "died" in runs.output("raise SystemExit('died')\n")
        assert "Traceback" in runs.output("import os, sys\nprint(1 / 0)\n")
    with pytest.raises(ValueError, match="runner, subproc"):
        Runs("thread", 1, ".")


def test_help_of_the_command():
    done = subprocess.run([sys.executable, "-m", "tilelang.autodd", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "--err-msg MSG" in done.stdout and "autodd: freeze-start" in done.stdout
    assert "RuntimeWarning" not in done.stderr


def test_a_failing_kernel_is_cut_down(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text('''import tilelang
import tilelang.language as T
NOISE = [1, 2, 3]
@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((64,), "float32")
        T.copy(A, S)
        for i in T.Parallel(64):
            S[i, 0] = 1.0
        T.copy(S, A)
''')
    out = tmp_path / "out.py"
    assert main([str(source), "--err-msg", "S is 1-dimensional", "-o", str(out)]) == 0
    text = out.read_text()
    assert "alloc_shared" in text and "NOISE" not in text and "T.copy" not in text and len(text.splitlines()) <= 9
