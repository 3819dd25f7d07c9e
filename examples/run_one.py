"""One example in a process of its own, for run_all.py: its checks first, then, when told to, the times of its kernels.

    python examples/run_one.py gemm/gemm.py '[{"function": "check_gemm", "sizes": {"m": 64}}]' [--measure]

A row may name a target and a backend.  Results are lines on stdout that start with "@" and hold JSON: {"starts": row},
{"checked": row, ...} or {"failed": row, ...}, then {"idle": true}.  With --measure the process then waits for a line on
stdin, so that nothing else runs on the GPU while kernels are timed, and gives {"timed": row, "calls": [...]}.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent


def tell(**facts: Any) -> None:
    """One line for the parent."""
    print("@" + json.dumps(facts), flush=True)


def load(file: Path) -> Any:
    """The module at a path, with the files beside it importable by their names."""
    sys.path[:0] = [str(file.parent), str(EXAMPLES)]
    spec = importlib.util.spec_from_file_location("example", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the rows of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="an example, by its place under examples/ or any path")
    parser.add_argument("rows", help="JSON: [{function, sizes, target, backend}]")
    parser.add_argument("--measure", action="store_true", help="time the kernels after a line on stdin")
    options = parser.parse_args()
    module = load(EXAMPLES / options.file)  # an absolute path stays as it is
    from harness import Comparison, Place
    from measuring import Measured

    calls: dict[int, Measured] = {}
    for k, row in enumerate(json.loads(options.rows)):
        tell(starts=k)
        start = time.perf_counter()
        try:
            check = getattr(module, row["function"])
            measured = Measured() if options.measure else None
            on = Place(row.get("target", "auto"), row.get("backend"), measured)
            taken = {n: p.default for n, p in inspect.signature(check).parameters.items() if n != "on"}
            sizes = {**taken, **row["sizes"]}
            found = check(on=on, **row["sizes"])
            found = [found] if isinstance(found, Comparison) else list(found)
            tell(checked=k, sizes=sizes, seconds=time.perf_counter() - start,
                 comparisons=[{"name": c.name, "error": c.error, "bound": c.bound, "ok": c.ok} for c in found])
            if measured is not None:
                calls[k] = measured
        except Exception as e:
            traceback.print_exc()
            tell(failed=k, error=f"{type(e).__name__}: {e}".splitlines()[0], seconds=time.perf_counter() - start)
    release()
    tell(idle=True)
    if options.measure and sys.stdin.readline():
        for k, measured in calls.items():
            try:
                tell(timed=k, calls=[c.timed() for c in measured.calls])
            except Exception as e:
                traceback.print_exc()
                tell(timed=k, calls=[], error=f"{type(e).__name__}: {e}".splitlines()[0])
            measured.calls.clear()


def release() -> None:
    """Give memory that references used back to the GPU: other examples run beside this process while it waits."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
