"""Bodies for benchmarks/survey.py: the programs of tests/user_programs/as_others and of benchmarks/suite/bodies, one folder a
manner (a module, or a folder of modules), one script a program.

    python benchmarks/suite/survey_bodies.py FOLDER
    python benchmarks/survey.py FOLDER/*
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = '''"""One program of {package}.{manner}: it uses tilelang."""

import sys

sys.path.insert(0, {place!r})

{run}
'''
OTHERS = '''from as_others import harness, {manner}

harness.build(next(p for p in {manner}.PROGRAMS if p.name == {name!r}), "cubin")'''
BODIES = '''import bodies

bodies.compile_program({manner!r}, {name!r})'''
PACKAGES = {HERE.parents[1] / "tests" / "user_programs" / "as_others": OTHERS, HERE / "bodies": BODIES}


def names(file: Path) -> list[str]:
    """Names of the programs that a module registers: `@program("name", ...)` or Program("name", ...)."""
    calls = (n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Call))
    first = [(c.args or [k.value for k in c.keywords if k.arg == "name"])[:1] for c in calls
             if isinstance(c.func, ast.Name) and c.func.id.lower() == "program"]
    return [str(a[0].value) for a in first if a and isinstance(a[0], ast.Constant)]


def main(out: Path) -> None:
    for package, run in PACKAGES.items():
        for file in sorted(package.rglob("*.py")):
            manner = file.relative_to(package).with_suffix("").parts[0]
            for name in names(file):
                (out / manner).mkdir(parents=True, exist_ok=True)
                (out / manner / f"{name}.py").write_text(SCRIPT.format(
                    package=package.name, manner=manner, place=str(package.parent), run=run.format(manner=manner, name=name)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
