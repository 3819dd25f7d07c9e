"""Which rows of the specification are shown by which tests, and on which executions.

    python tests/spec/spec_status.py --write     renew docs/spec-status.md
    python tests/spec/spec_status.py             print what is missing

A test names the rows it shows: `@pytest.mark.spec("L8:Pipelined", "T.copy")`.  Rows stand in rows.txt, names of the
language (tiers A and B) in names.txt; a name without a mark is credited to a test that uses `T.name`.  What must be
computed or refused stands in musts.txt, with its outcome.  Executions are read from the helpers that a test calls, so
nothing is run here.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS, HERE = ROOT / "tests", pathlib.Path(__file__).resolve().parent
STATUS = ROOT / "docs" / "spec-status.md"
SHOWN = 4  # tests listed per row
_ALL = r"\beverywhere\(|\bagree\(|\bEXECUTIONS\b|\bWITH_HOPPER\b"
# execution -> what the source of a test (and of the helpers it calls) says when it uses it
_USES = {
    "tile": _ALL + r"|run_tile\(|\"tile\"",
    "simulator": _ALL + r"|run_device\(|\"simulator\"|\bsimulate",
    "cpu": _ALL + r"|\"cpu\"|compile_cpu|compile_tile\(",
    "cuda text": r"\bcuda_text\(|print_kernel\(|compile_cubin\(|get_kernel_source\(|\bassembled?\(",
    "gpu": r"mark\.gpu",
    "refusal": r"pytest\.raises\(|\brefused\(|\bfailure\(",
}

_ELSEWHERE = {"pytest.mark.gpu", "pytest.mark.slow"}  # not in a default run


@dataclass
class Test:
    """One test function.  daily: a default run has it, on a machine without a GPU."""

    id: str
    rows: tuple[str, ...]
    names: frozenset[str]
    executions: tuple[str, ...]
    daily: bool = True


@dataclass
class Status:
    """rows: id -> (tier, text).  names: name -> tier.  musts: id -> (outcome, text).

    shown: row, T.name or must -> tests.  unknown: marks of no row.
    """

    rows: dict[str, tuple[str, str]]
    names: dict[str, str]
    musts: dict[str, tuple[str, str]]
    shown: dict[str, list[Test]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def missing(self) -> list[str]:
        """Rows and names of tiers A and B, and musts, without a test."""
        wanted = [r for r, (tier, _) in self.rows.items() if tier in "AB"] + [f"T.{n}" for n in self.names] + [*self.musts]
        return [r for r in wanted if not any(t.daily for t in self.shown.get(r, ()))]


def read_rows(file: str = "rows.txt") -> dict[str, tuple[str, str]]:
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.split("|", 2)] for line in lines if line and not line.startswith("#")]
    return {row: (tier, text) for row, tier, text in cells}


def read_names() -> dict[str, str]:
    lines = (HERE / "names.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))  # type: ignore[misc]


def collect(tests: pathlib.Path = TESTS) -> list[Test]:
    """All test functions below a folder, without importing them."""
    out = []
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined: dict[str, ast.stmt] = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        defined.update({t.id: n for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
                        if isinstance(t, ast.Name)})
        for n in tree.body:  # programs in a module beside the test
            beside = path.parent / f"{n.module}.py" if isinstance(n, ast.ImportFrom) and n.module else path
            if beside != path and beside.exists():
                other = ast.parse(beside.read_text(encoding="utf-8")).body
                defined.update({f.name: f for f in other if isinstance(f, ast.FunctionDef) and f.name not in defined})
        module_values = [n.value for n in tree.body if isinstance(n, ast.Assign)
                         and getattr(n.targets[0], "id", "") == "pytestmark"]
        module_rows = _marked(module_values)
        module_marks = {ast.unparse(e) for v in module_values for e in getattr(v, "elts", [v])}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = _source(node, defined)
                used = tuple(e for e, pattern in _USES.items() if re.search(pattern, text))
                names = frozenset(re.findall(r"\bT\.(\w+)", text))
                rows = (*module_rows, *_marked(node.decorator_list))
                marks = {ast.unparse(d) for d in node.decorator_list} | module_marks
                out.append(Test(f"{path.relative_to(tests)}::{node.name}", rows, names, used, not marks & _ELSEWHERE))
    return out


def _marked(decorators: list[ast.expr]) -> tuple[str, ...]:
    """Rows in `pytest.mark.spec(...)` calls."""
    calls = [d for d in decorators for d in ([d] if isinstance(d, ast.Call) else getattr(d, "elts", []))]
    return tuple(a.value for d in calls if ast.unparse(d.func) == "pytest.mark.spec"  # type: ignore[attr-defined]
                 for a in d.args if isinstance(a, ast.Constant))  # type: ignore[attr-defined]


def _source(node: ast.FunctionDef, defined: dict[str, ast.stmt]) -> str:
    """Text of a test, and of the functions and tables of its module that it uses, directly or through others."""
    todo: list[ast.stmt] = [node]
    seen, out = {node.name}, []
    while todo:
        f = todo.pop()
        out.append(ast.unparse(f).replace("'", '"'))
        for n in ast.walk(f):
            if isinstance(n, ast.Name) and n.id in defined and n.id not in seen and not n.id.startswith("test_"):
                seen.add(n.id)
                todo.append(defined[n.id])
    return "\n".join(out)


def status(tests: pathlib.Path = TESTS) -> Status:
    """What is shown today."""
    out = Status(read_rows(), read_names(), read_rows("musts.txt"))
    found = collect(tests)
    for t in found:
        for row in t.rows:
            known = row in out.rows or row in out.musts or row.startswith("T.")
            if not known:
                out.unknown.append(f"{t.id}: {row}")
            out.shown.setdefault(row, []).append(t)
    for name in out.names:
        if not out.shown.get(f"T.{name}"):
            users = sorted((t for t in found if name in t.names), key=lambda t: (len(t.names), t.id))
            if users:
                out.shown[f"T.{name}"] = users[:1]
    return out


def _line(row: str, tier: str, text: str, tests: list[Test]) -> str:
    runs = [e for e in _USES if any(e in t.executions for t in tests)]
    more = f"<br>and {len(tests) - SHOWN} more" if len(tests) > SHOWN else ""
    listed = "<br>".join(f"`{t.id}`" for t in tests[:SHOWN]) + more
    return f"| {row} | {tier} | {text} | {', '.join(runs) or ('trace' if tests else '')} | {listed or '**none**'} |"


def render(s: Status) -> str:
    """The text of docs/spec-status.md."""
    missing = s.missing()
    upper = len([r for r in s.rows.values() if r[0] in "AB"]) + len(s.names) + len(s.musts)
    rows = [_line(r, tier, text, s.shown.get(r, [])) for r, (tier, text) in s.rows.items()]
    names = [_line(f"T.{n}", tier, "", s.shown.get(f"T.{n}", [])) for n, tier in s.names.items()]
    musts = [_line(m, outcome, text, s.shown.get(m, [])) for m, (outcome, text) in s.musts.items()]
    head = ["| row | tier | about | runs on | tests |", "|---|---|---|---|---|"]
    return "\n".join([
        "# Status of the specification", "",
        "Generated by `python tests/spec/spec_status.py --write` from the marks of the tests; a test fails when it is",
        "stale.  Rows: L language, R runtime (section:row).  \"Runs on\" lists what the tests use: tile meaning, device",
        "simulator, CPU, CUDA text (assembled where NVRTC is), a GPU, refusals.",
        "", f"Rows and names of tiers A and B, and musts: {upper}, without a test: {', '.join(missing) or 'none'}.", "",
        "## What must be computed or refused", "",
        "The known shapes of silent failure (M) and every \"must\" of the specification.  Each computes right on every",
        "execution, or is refused by a named error.", "",
        head[0].replace("tier", "outcome"), head[1], *musts, "",
        "## Rows", "", *head, *rows, "", "## Names", "", *head, *names, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew docs/spec-status.md")
    args = parser.parse_args()
    s = status()
    if args.write:
        STATUS.write_text(render(s), encoding="utf-8")
    print(f"without a test: {' '.join(s.missing()) or 'nothing'}")
    if s.unknown:
        print("marks of no row: " + "; ".join(s.unknown))
    return 1 if s.unknown else 0


if __name__ == "__main__":
    sys.exit(main())
