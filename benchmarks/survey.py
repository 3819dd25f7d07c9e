"""Which programs of a package compile for a GPU: a table of what stops the others.

    python benchmarks/survey.py FOLDER [FOLDER ...]                # each folder is a package, or holds scripts
    python benchmarks/survey.py FOLDER --tree CHECKOUT             # the same with another checkout of tilelang
    python benchmarks/survey.py FOLDER --before CHECKOUT           # with both, another first
    python benchmarks/survey.py FOLDER --json survey.json          # every request and its error, as JSON

Each Python file runs in a process of its own: modules are imported, scripts run as `__main__`, and files named test_*.py run
under pytest.  Every request to compile a kernel is recorded and compiled for sm_90a (--arch).  No kernel runs: torch works
with fake tensors on a fake CUDA device, kernels return tensors without contents, and comparisons pass.  A request that fails
does not stop its file.  Needs torch and pytest; no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def files_of(folder: Path) -> list[Path]:
    """Python files below a folder that name tilelang, in order."""
    found = (p for p in sorted(folder.rglob("*.py")) if not any(part.startswith((".", "__pycache__")) for part in p.parts))
    return [p for p in found if p.name != "__init__.py" and "tilelang" in p.read_text(encoding="utf-8", errors="replace")]


def survey_file(file: Path, folder: Path, tree: Path, arch: str, seconds: int) -> dict[str, Any]:
    """Run one file in its own process.  Returns its requests: {"file", "stopped", "requests": [{"name", "error", ...}]}."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        paths = [str(tree), str(folder.parent), str(folder), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
               "TILELANG_DEFAULT_TARGET": json.dumps({"kind": "cuda", "arch": arch}), "TILELANG_DISABLE_CACHE": "1",
               "TILELANG_CACHE_DIR": place, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(HERE / "suite" / "survey_child.py"), str(file), str(folder), str(out)]
        try:
            done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=seconds)
            last = (done.stderr.strip().splitlines() or [f"rc {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            last = f"no end within {seconds} s"
        found = json.loads(out.read_text()) if out.exists() else {"requests": [], "stopped": f"died: {last}"}
    return {"file": str(file.relative_to(folder)), **found}


def table(package: str, files: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: files, files that import, distinct requests and how many of them compile, and the causes of failures."""
    requests: dict[tuple[str, str, str], dict[str, Any]] = {}
    for f in files:
        for r in f["requests"]:
            requests.setdefault((f["file"], r["name"], r["program"]), r)
    stopped = [f for f in files if f["stopped"]]
    causes = Counter(r["error"] for r in requests.values() if r["error"])
    causes.update(f["stopped"] for f in stopped)
    return {"package": package, "files": len(files), "whole": len(files) - len(stopped), "kernels": len(requests),
            "compiled": sum(not r["error"] for r in requests.values()), "causes": dict(causes.most_common())}


def commit_of(tree: Path) -> str:
    """Of a checkout; empty of a copy without a repository."""
    done = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=tree, capture_output=True, text=True)
    return done.stdout.strip() if (tree / ".git").exists() else ""


def survey(folders: list[Path], tree: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run every file of the folders with one checkout: {"commit", "packages": rows of the table, "files"}."""
    from rich.progress import Progress

    jobs = [(p, folder) for folder in folders for p in files_of(folder)]
    found: dict[str, list[dict[str, Any]]] = {}
    with Progress(transient=True) as bar, ThreadPoolExecutor(args.jobs) as pool:
        task = bar.add_task("files", total=len(jobs))
        for (_, folder), result in zip(jobs, pool.map(lambda job: survey_file(*job, tree, args.arch, args.seconds), jobs)):
            found.setdefault(folder.name, []).append(result)
            bar.advance(task)
    return {"commit": commit_of(tree), "packages": [table(name, files) for name, files in found.items()], "files": found}


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the table of one checkout."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("package", "files", "run to the end", "kernels", "compile", "what stops the others", title=title)
    for r in rows:
        causes = "\n".join(f"{n} x {cause}" for cause, n in r["causes"].items())
        shown.add_row(r["package"], *(str(r[k]) for k in ("files", "whole", "kernels", "compiled")), causes)
    shown.add_row("all", *(str(sum(r[k] for r in rows)) for k in ("files", "whole", "kernels", "compiled")), "", style="bold")
    Console().print(shown)


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    ap.add_argument("folders", nargs="+", type=Path, help="packages, or folders of scripts, that use tilelang")
    ap.add_argument("--tree", type=Path, default=HERE.parent, help="checkout of tilelang to use")
    ap.add_argument("--before", type=Path, help="checkout of tilelang to compare with")
    ap.add_argument("--arch", default="sm_90a", help="architecture to compile for")
    ap.add_argument("--jobs", type=int, default=2, help="processes at once")
    ap.add_argument("--seconds", type=int, default=300, help="time limit of one file")
    ap.add_argument("--json", type=Path, help="write everything that was found to this file")
    args = ap.parse_args()
    folders = [folder.resolve() for folder in args.folders]
    if not any(files_of(folder) for folder in folders):
        ap.error("no Python file of these folders names tilelang")
    trees = {"before": args.before.resolve()} if args.before else {}
    trees["after" if trees else "found"] = args.tree.resolve()
    record: dict[str, Any] = {"date": str(datetime.date.today()), "arch": args.arch, "command": " ".join(
        ["python", *sys.argv])}
    for when, tree in trees.items():
        record[when] = survey(folders, tree, args)
        show(record[when]["packages"], str(tree))
    if args.json:
        args.json.write_text(json.dumps(record if len(trees) > 1 else {**record, **record.pop("found")}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
