"""Bodies for benchmarks/survey.py: the programs of tests/user_programs/as_others, one folder a manner (a module, or a
folder of modules), one script a program.

    python benchmarks/suite/survey_bodies.py FOLDER
    python benchmarks/survey.py FOLDER/*
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / "tests" / "user_programs"
SCRIPT = '''"""One program of as_others.{manner}."""

import sys

sys.path.insert(0, {place!r})

from as_others import harness, {manner}

harness.build(next(p for p in {manner}.PROGRAMS if p.name == {name!r}), "cubin")  # a program that uses tilelang
'''


def names(file: Path) -> list[str]:
    """Names of the programs that a module registers: `@program("name", ...)` or Program("name", ...)."""
    calls = (n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Call))
    first = [(c.args or [k.value for k in c.keywords if k.arg == "name"])[:1] for c in calls
             if isinstance(c.func, ast.Name) and c.func.id.lower() == "program"]
    return [str(a[0].value) for a in first if a and isinstance(a[0], ast.Constant)]


def main(out: Path) -> None:
    top = PLACE / "as_others"
    for file in sorted(top.rglob("*.py")):
        manner = file.relative_to(top).with_suffix("").parts[0]
        for name in names(file):
            (out / manner).mkdir(parents=True, exist_ok=True)
            (out / manner / f"{name}.py").write_text(SCRIPT.format(manner=manner, place=str(PLACE), name=name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
