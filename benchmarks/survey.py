"""Which programs of a package compile for a GPU: a table of what stops the others.

    python benchmarks/survey.py FOLDER [FOLDER ...]                # each folder is a package, or holds scripts
    python benchmarks/survey.py FOLDER --tree CHECKOUT             # the same with another checkout of tilelang
    python benchmarks/survey.py FOLDER --json survey.json          # every request and its error, as JSON

Each Python file runs in a process of its own: modules are imported, scripts run as `__main__`, and files named test_*.py run
under pytest.  Every request to compile a kernel is recorded and compiled for sm_90a (--arch).  No kernel runs: torch works
with fake tensors on a fake CUDA device, kernels return tensors without contents, and comparisons pass.  A request that fails
does not stop its file.  Needs torch and pytest; no GPU.
"""

from __future__ import annotations

import argparse
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


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    ap.add_argument("folders", nargs="+", type=Path, help="packages, or folders of scripts, that use tilelang")
    ap.add_argument("--tree", type=Path, default=HERE.parent, help="checkout of tilelang to use")
    ap.add_argument("--arch", default="sm_90a", help="architecture to compile for")
    ap.add_argument("--jobs", type=int, default=2, help="processes at once")
    ap.add_argument("--seconds", type=int, default=300, help="time limit of one file")
    ap.add_argument("--json", type=Path, help="write everything that was found to this file")
    args = ap.parse_args()
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    jobs = [(p, folder.resolve()) for folder in args.folders for p in files_of(folder.resolve())]
    if not jobs:
        ap.error("no Python file of these folders names tilelang")
    console = Console()
    found: dict[Path, list[dict[str, Any]]] = {}
    with Progress(console=console, transient=True) as bar, ThreadPoolExecutor(args.jobs) as pool:
        task = bar.add_task("files", total=len(jobs))
        runs = pool.map(lambda job: survey_file(*job, args.tree.resolve(), args.arch, args.seconds), jobs)
        for (_, folder), result in zip(jobs, runs):
            found.setdefault(folder, []).append(result)
            bar.advance(task)
    rows = [table(folder.name, files) for folder, files in found.items()]
    shown = Table("package", "files", "run to the end", "kernels", "compile", "what stops the others")
    for r in rows:
        causes = "\n".join(f"{n} x {cause}" for cause, n in r["causes"].items())
        shown.add_row(r["package"], *(str(r[k]) for k in ("files", "whole", "kernels", "compiled")), causes)
    total = [sum(r[k] for r in rows) for k in ("files", "whole", "kernels", "compiled")]
    shown.add_row("all", *map(str, total), "", style="bold")
    console.print(shown)
    if args.json:
        args.json.write_text(json.dumps({"arch": args.arch, "packages": rows,
                                         "files": {str(k.name): v for k, v in found.items()}}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
