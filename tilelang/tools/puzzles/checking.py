"""Checks a learner's kernel by the reference interpreter and the device simulator, and says what is wrong with it.

`check` runs in this process (notebooks); `check_file` runs a file in a process of its own, which has a limit of time.
"""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tilelang.errors import InternalError, TileLangError
from tilelang.ir import Func, Launch, Var, walk
from tilelang.ir.record import record
from tilelang.jit.report import facts_of
from tilelang.simulator.device.run import run_device
from tilelang.simulator.reference.run import run_tile
from tilelang.target import of_arch
from tilelang.transform.pipeline import lower

from .book import puzzle
from .tasks import TASKS, Facts, Task

SECONDS = 60  # a check takes about one; a kernel that loops for ever is stopped
_RULES = {"sim-race": "race", "parallel-order": "race", "sim-async": "race", "sim-proxy": "race",
          "sync-unordered": "order of threads", "sim-out-of-bounds": "bounds", "sim-barrier": "deadlock",
          "sim-mbarrier": "barrier", "shared-memory": "shared memory",
          "sim-uninitialized": "read before written (a missing clear?)"}


@record
class Verdict:
    """The result of a check.  rule: what is broken, "" where the puzzle is solved.  text: what a learner reads."""

    name: str
    rule: str
    text: str

    @property
    def ok(self) -> bool:
        return not self.rule

    def __str__(self) -> str:
        p = puzzle(self.name)
        head = f"{p.number}. {p.title}: "
        return head + (f"solved. {self.text}" if self.ok else f"not yet.\nrule: {self.rule}\n{self.text}")

    __repr__ = __str__


class _Wrong(Exception):
    """A finding: (rule, text)."""


def check(function: Any, name: str = "") -> Verdict:
    """Check a kernel against the puzzle of its name.

    function: a @tilelang.jit function.  name: of the puzzle, where the function has another one.  Raises LookupError for an
    unknown puzzle; whatever is wrong with the kernel is in the verdict.
    """
    name = puzzle(name or getattr(function, "__name__", "?")).function
    task = TASKS[name]
    try:
        if not hasattr(function, "get_tir"):
            raise _Wrong("kernel", f"`{name}` is a {type(function).__name__}; put @tilelang.jit above its def")
        for sizes in task.cases:
            _case(function, task, sizes)
    except _Wrong as e:
        return Verdict(name, *e.args)
    except (TileLangError, InternalError) as e:
        return Verdict(name, _RULES.get(getattr(e, "kind", ""), getattr(e, "kind", "compiler")), str(e))
    except Exception as e:  # the learner's own Python, run while the kernel is traced
        return Verdict(name, "Python", python_error(e, getattr(getattr(function, "__code__", None), "co_filename", "")))
    shown = " and ".join(", ".join(f"{k} = {v}" for k, v in c.items()) or "the fixed sizes" for c in task.cases)
    return Verdict(name, "", f"Interpreter and simulator agree with NumPy for {shown}.")


def python_error(e: BaseException, file: str) -> str:
    """An error of Python with the line of the learner's file that led to it, without a trace."""
    if isinstance(e, SyntaxError):
        return f"{e.filename}:{e.lineno}: {e.msg}\n    {(e.text or '').strip()}"
    own = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
    at = f"{file}:{own[-1].lineno}: " if own else ""
    line = f"\n    {linecache.getline(file, own[-1].lineno or 0).strip()}" if own else ""
    return f"{at}{type(e).__name__}: {e}{line}"


def _case(function: Any, task: Task, sizes: dict[str, int]) -> None:
    """One set of sizes on both machines.  Raises _Wrong, and the errors of the compiler and of the interpreters."""
    where = ", ".join(f"{k} = {v}" for k, v in sizes.items())
    func = function.get_tir(**sizes).func
    given = task.inputs(**sizes)
    if len(func.buffers) != len(given) + 1:
        raise _Wrong("kernel", f"the kernel has {len(func.buffers)} tensors; it takes {', '.join(given)} and returns one")
    want = task.want(given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = func.buffers[-1][1].name
        got = run_tile(func, list(given.values()))[out]
        if got.shape != want.shape:
            raise _Wrong("shape", f"With {where}, `{out}` has shape {got.shape}, expected {want.shape}")
        unwritten = [str(w.message).partition(": ")[2] for w in told if "unwritten-output" in str(w.message)]
        if unwritten:
            raise _Wrong("unwritten output", f"With {where}: {unwritten[0]}")
        target = of_arch(task.arch)
        try:
            _compare(task, given, out, got, want, f"With {where}, on the reference interpreter")
        except _Wrong as e:
            _raise_race(func, given, target)
            also = [f"Also: {text}." for rule in task.rules if (text := rule(func))]
            raise _Wrong(e.args[0], "\n".join([e.args[1], *also])) from None
        lowered = lower(func, target)
        run = run_device(lowered.host, list(given.values()))
    _compare(task, given, out, run.outputs[out], want, f"With {where}, on the simulated {task.arch}")
    facts = Facts(facts_of(lowered, func, target)[0], run)
    findings = {r.__qualname__: r(func) for r in task.rules} | {c.__qualname__: c(facts) for c in task.costs}
    for name, lacks in findings.items():
        if lacks:
            raise _Wrong(name.partition(".")[0].replace("_", " "), lacks)


def _raise_race(func: Func, given: Any, target: Any) -> None:
    """Raises sim-race and its relatives where threads race, which is then the cause of wrong values."""
    launches = [n for n in walk(func.body) if isinstance(n, Launch)]
    if not any(v in n.thread_vars for n in launches for v in walk(n.body, Var)):
        return  # a program of tiles alone, whose threads the compiler orders
    try:
        run_device(lower(func, target).host, list(given.values()))
    except TileLangError as e:
        if _RULES.get(e.kind) == "race":
            raise


def _compare(task: Task, given: Any, name: str, got: np.ndarray, want: np.ndarray, where: str) -> None:
    """Raises _Wrong, which names the first wrong element, the region of all of them and, where it is known, the cause."""
    bound = np.broadcast_to(np.asarray(task.error(given), np.float64), want.shape)
    bad = _differ(got, want, bound)
    if not bad.any():
        return
    at = tuple(int(i[0]) for i in np.nonzero(bad))
    spans = [(int(i.min()), int(i.max()) + 1) for i in np.nonzero(bad)]
    region = ", ".join(f"{a}:{b}" for a, b in spans)
    text = (f"{where}: {name}[{', '.join(map(str, at))}] is {got[at]:.6g}, expected {want[at]:.6g}.\n"
            f"{int(bad.sum())} of {bad.size} elements are wrong, all of them in {name}[{region}].")
    with np.errstate(all="ignore"):
        general = (("zeros", lambda a: 0 * want), ("the right numbers with rows and columns exchanged", lambda a: want.T))
        for cause, wrong in (*task.traps, *general):
            values = np.asarray(wrong(given))
            loose = np.maximum(bound, 2.0**-11 * np.abs(got) * (bound > 0))
            if values.shape == got.shape and not _differ(got, values, loose).any():
                text += f"\nThese are {cause}."
                break
    raise _Wrong("values", text)


def _differ(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), np.asarray(want).astype(np.float64)
        return ~((np.abs(a - b) <= bound) | (a == b))


# ---- files ----------------------------------------------------------------------------------------------------------
def check_file(path: Path, name: str, seconds: float = SECONDS) -> Verdict:
    """Check a learner's file, in a process of its own.  What it prints is passed on."""
    if not path.exists():
        return Verdict(name, "file", f"{path} does not exist; `tilelang puzzles start` writes the files")
    command = [sys.executable, "-c", "from tilelang.tools.puzzles.checking import main; main()", str(path), name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds, check=False, text=True, encoding="utf-8",
                              env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    except subprocess.TimeoutExpired:
        return Verdict(name, "time", f"{path} was stopped after {seconds:g} s: is there a loop that does not end?")
    try:
        return Verdict(**json.loads(done.stdout.rpartition("\n")[2]))
    except (ValueError, TypeError):
        return Verdict(name, "Python", f"{path} ended Python with exit status {done.returncode} before its kernel was checked")


def checked(path: str, name: str) -> Verdict:
    """Run a file and check the function of this name."""
    names: dict[str, Any] = {"__name__": "puzzle", "__file__": path}
    try:
        sys.path.insert(0, str(Path(path).resolve().parent))
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), names)
    except TileLangError as e:
        return Verdict(name, e.kind, str(e))
    except (Exception, SystemExit) as e:  # the learner's file may do anything
        return Verdict(name, "Python", python_error(e, path))
    if name not in names:
        return Verdict(name, "kernel", f"{path} has no function `{name}`")
    return check(names[name], name)


def main() -> None:
    """The child process: the verdict is the last line of what it prints."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what the file prints goes to the terminal
    path, name = sys.argv[1:]
    try:
        v = checked(path, name)
    except KeyboardInterrupt:  # of the file: that of a user ends this process's parent too
        v = Verdict(name, "Python", f"{path} raises KeyboardInterrupt")
    sys.stdout.flush()
    os.write(answer, ("\n" + json.dumps({"name": v.name, "rule": v.rule, "text": v.text})).encode())
