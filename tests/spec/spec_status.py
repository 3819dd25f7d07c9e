"""Which rows of the specification are shown by which tests, and which executions passed in them.

    python -m pytest --record-outcomes           run the marked tests, renew outcomes.json (`-m gpu`: outcomes_gpu.json)
    python tests/spec/spec_status.py --write     renew tests/spec/spec-status.md
    python tests/spec/spec_status.py             print what is missing, and rows that fewer executions show

A test names the rows it shows: `@pytest.mark.spec("L8:Pipelined", "T.copy")`.  Rows stand in rows.txt, names of the
language (tiers A and B) in names.txt, what must be computed or refused in musts.txt, with its outcome.  Executions are
those that came to their end when the outcomes were recorded (tests/outcomes.py); nothing is run here.
"""

from __future__ import annotations

import argparse
import ast
import functools
import pathlib
import subprocess
import sys
from dataclasses import dataclass, field, replace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import outcomes
from completed import EXECUTIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS, HERE = ROOT / "tests", pathlib.Path(__file__).resolve().parent
STATUS = HERE / "spec-status.md"
SHOWN = 4  # tests listed per row
# one letter each, behind the name of a test
LETTERS = dict(zip(EXECUTIONS, "TSCAPGtscaRE", strict=True))
WORDS = {"tile": "tile", "simulator": "simulator", "cpu": "CPU", "cuda": "CUDA assembled", "printed": "CUDA printed",
         "gpu": "GPU", "refusal": "refusal", "error": "error"}
EVERY = ("tile", "simulator", "cpu", "cuda")
RUNNING = ("L", "T.", "R4:")  # rows that executions differ in: the language, and checks of calls
_ELSEWHERE = {"pytest.mark.gpu", "pytest.mark.slow"}  # not in a default run


@dataclass
class Test:
    """One test function.  executions: that passed.  daily: a default run has it, on a machine without a GPU.

    recorded: its outcome is.
    """

    id: str
    rows: tuple[str, ...]
    executions: tuple[str, ...] = ()
    daily: bool = True
    recorded: bool = False


@dataclass
class Status:
    """rows: id -> (tier, text).  names: name -> tier.  musts: id -> (outcome, text).

    shown: row, T.name or must -> tests.  unknown: marks of no row.  unrecorded: marked tests whose outcome is not recorded.
    stale: recorded tests that are gone.  gpu: device and date of the outcomes on a GPU.
    """

    rows: dict[str, tuple[str, str]]
    names: dict[str, str]
    musts: dict[str, tuple[str, str]]
    shown: dict[str, list[Test]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unrecorded: list[Test] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    gpu: dict[str, str] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """Rows and names of tiers A and B, and musts, without a test."""
        wanted = [r for r, (tier, _) in self.rows.items() if tier in "AB"] + [f"T.{n}" for n in self.names] + [*self.musts]
        return [r for r in wanted if not any(t.daily for t in self.shown.get(r, ()))]

    def narrow(self) -> dict[str, list[str]]:
        """Rows and names of tiers A and B that something runs -> executions of `EVERY` that no test of theirs completed, and
        that refuse it in none.

        The text for a GPU counts where NVRTC assembled it, and a GPU for both.
        """
        out = {}
        for row in [*(r for r, (tier, _) in self.rows.items() if tier in "AB"), *(f"T.{n}" for n in self.names)]:
            done = {e for t in self.shown.get(row, ()) for e in t.executions}
            lacks = [e for e in EVERY if not {e, f"no-{e}"} & done and not (e == "cuda" and "gpu" in done)]
            if lacks and row.startswith(RUNNING) and {*EVERY, "gpu"} & done:
                out[row] = lacks
        return out


def read_rows(file: str = "rows.txt") -> dict[str, tuple[str, str]]:
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.split("|", 2)] for line in lines if line and not line.startswith("#")]
    return {row: (tier, text) for row, tier, text in cells}


def read_names() -> dict[str, str]:
    lines = (HERE / "names.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))  # type: ignore[misc]


@functools.cache
def collect(tests: pathlib.Path = TESTS) -> tuple[Test, ...]:
    """All test functions below a folder, without importing them; executions are not filled in."""
    out = []
    for path in sorted(tests.rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        module_values = [n.value for n in body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "pytestmark"]
        module_rows = _marked(module_values)
        module_marks = {ast.unparse(e) for v in module_values for e in getattr(v, "elts", [v])}
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                rows = (*module_rows, *_marked(node.decorator_list))
                marks = {ast.unparse(d) for d in node.decorator_list} | module_marks
                out.append(Test(f"{path.relative_to(tests)}::{node.name}", rows, daily=not marks & _ELSEWHERE))
    return tuple(out)


def _marked(decorators: list[ast.expr]) -> tuple[str, ...]:
    """Rows in `pytest.mark.spec(...)` calls."""
    calls = [d for d in decorators for d in ([d] if isinstance(d, ast.Call) else getattr(d, "elts", []))]
    return tuple(a.value for d in calls if ast.unparse(d.func) == "pytest.mark.spec"  # type: ignore[attr-defined]
                 for a in d.args if isinstance(a, ast.Constant))  # type: ignore[attr-defined]


def status(tests: pathlib.Path = TESTS, files: dict[str, pathlib.Path] = outcomes.FILES) -> Status:
    """What is shown today, by the recorded outcomes."""
    here, gpu = outcomes.read(files["cpu"]), outcomes.read(files["gpu"])
    out = Status(read_rows(), read_names(), read_rows("musts.txt"), gpu=gpu.about)
    found = [t for t in collect(tests) if t.rows]
    for t in found:
        done = {*here.of(t.id), *gpu.of(t.id)}
        t = replace(t, executions=tuple(e for e in EXECUTIONS if e in done), recorded=t.id in (here if t.daily else gpu).tests)
        if not t.recorded:
            out.unrecorded.append(t)
        for row in t.rows:
            if row not in out.rows and row not in out.musts and row.removeprefix("T.") == row:
                out.unknown.append(f"{t.id}: {row}")
            out.shown.setdefault(row, []).append(t)
    out.stale = sorted({*here.tests, *gpu.tests} - {t.id for t in found})
    return out


def _listed(tests: list[Test]) -> list[Test]:
    """The tests to name: such that together they show every execution that any does, then the first others."""
    left, out = list(tests), []
    seen: set[str] = set()
    while left and len(out) < SHOWN:
        best = max(left, key=lambda t: len(set(t.executions) - seen))
        out.append(best)
        left.remove(best)
        seen.update(best.executions)
    return [t for t in tests if t in out]


def _line(row: str, tier: str, text: str, tests: list[Test]) -> str:
    done = {e for t in tests for e in t.executions}
    runs = [WORDS[e] for e in EXECUTIONS if e in done and e in WORDS and not (e == "printed" and "cuda" in done)]
    refusing = [WORDS[e] for e in EVERY if f"no-{e}" in done and e not in done]
    runs += [f"not {', '.join(refusing)}"] * bool(refusing)
    more = f"<br>and {len(tests) - SHOWN} more" if len(tests) > SHOWN else ""
    listed = "<br>".join(f"`{t.id}` {_letters(t)}" for t in _listed(tests)) + more
    return f"| {row} | {tier} | {text} | {', '.join(runs) or ('trace' if tests else '')} | {listed or '**none**'} |"


def _letters(t: Test) -> str:
    return "".join(LETTERS[e] for e in t.executions) or ("-" if t.recorded else "not recorded")


def render(s: Status) -> str:
    """The text of tests/spec/spec-status.md."""
    missing = s.missing()
    upper = len([r for r in s.rows.values() if r[0] in "AB"]) + len(s.names) + len(s.musts)
    rows = [_line(r, tier, text, s.shown.get(r, [])) for r, (tier, text) in s.rows.items()]
    names = [_line(f"T.{n}", tier, "", s.shown.get(f"T.{n}", [])) for n, tier in s.names.items()]
    musts = [_line(m, outcome, text, s.shown.get(m, [])) for m, (outcome, text) in s.musts.items()]
    head = ["| row | tier | about | passed on | tests |", "|---|---|---|---|---|"]
    return "\n".join([
        "# Status of the specification", "",
        "Generated by `python tests/spec/spec_status.py --write` from the marks of the tests and their recorded outcomes",
        "(`python -m pytest --record-outcomes`).  A test fails when it is stale, and every run of tests in which a marked",
        "test does something else than recorded.  Rows: L language, R runtime (section:row).",
        "\"Passed on\" lists the executions that came to their end in tests that passed; behind each test stand its own:",
        "T tile meaning, S device simulator, C CPU, A CUDA text assembled by NVRTC, P CUDA text printed, G launched on a",
        "GPU, R refused by a named error (t, s, c, a: by this execution), E refused by another exception, - none of them",
        "(traced, or Python's own business).  \"not CPU\": the CPU refuses by name what the row is about.",
        "", f"GPU outcomes: {_gpu(s)}.",
        "", f"Rows and names of tiers A and B, and musts: {upper}, without a test: {', '.join(missing) or 'none'}.", "",
        "## What must be computed or refused", "",
        "The known shapes of silent failure (M) and every \"must\" of the specification.  Each computes right on every",
        "execution, or is refused by a named error.", "",
        head[0].replace("tier", "outcome"), head[1], *musts, "",
        "## Rows", "", *head, *rows, "", "## Names", "", *head, *names, ""])


def _gpu(s: Status) -> str:
    late = [t.id for t in s.unrecorded if not t.daily]
    if not s.gpu:
        return f"not recorded yet ({len(late)} tests)"
    said = f"{s.gpu['device']}, {s.gpu['date']}"
    return said + (f"; {len(late)} tests are newer: " + ", ".join(f"`{t}`" for t in late) if late else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew tests/spec/spec-status.md")
    args = parser.parse_args()
    s = status()
    if args.write:
        STATUS.write_text(render(s), encoding="utf-8")
        subprocess.run([sys.executable, TESTS / "hip" / "amd_page.py"], check=True)  # it counts outcomes
    print(f"without a test: {' '.join(s.missing()) or 'nothing'}")
    for row, lacks in s.narrow().items():
        print(f"{row}: not on {', '.join(lacks)}")
    if s.unknown:
        print("marks of no row: " + "; ".join(s.unknown))
    return 1 if s.unknown else 0


if __name__ == "__main__":
    sys.exit(main())
