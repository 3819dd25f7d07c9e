"""Cold compiles: a fresh process with empty caches on a machine that does nothing else.

    python -m suite.cold PROVIDER WORKLOAD [LABEL]        (in benchmarks/) one compile, printed as a JSON line
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import providers as provider_table
from .compiling import compile_one, private_caches
from .providers import Skip
from .workloads import Workload, select

TIMEOUT = 120


def measure(names: Iterable[str], workloads: Iterable[Workload], repeat: int = 2) -> list[dict[str, Any]]:
    """For each provider and workload the seconds of `repeat` cold compiles of the first configuration.

    The compile ends with a loaded kernel, for kernels that compile when they are called with their first result.
    """
    out = []
    write_bytecode()
    for w in workloads:
        for name in names:
            provider = provider_table.get(name)
            if provider.unavailable() or type(provider).compile is provider_table.Provider.compile:
                continue
            try:
                label = provider.labels(w)[0]
            except Skip:
                continue
            found = [once(name, w.name, label) for _ in range(repeat)]
            seconds = [f["seconds"] for f in found if "seconds" in f]
            out.append({"provider": provider.name, "workload": w.name, "kind": w.kind, "label": label, "seconds": seconds,
                        "import_seconds": [f.get("import_seconds") for f in found],
                        "errors": [f["error"] for f in found if "error" in f]})
    return out


def write_bytecode(package: str = "tilelang") -> None:
    """The modules' bytecode, which installing a package writes: peers are installed, a checkout has none at first, and never
    where PYTHONDONTWRITEBYTECODE is set.  Raises nothing: what cannot be written is only slower."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        compileall.compile_dir(folder, quiet=2)


def once(provider: str, workload: str, label: str) -> dict[str, Any]:
    """One compile in a process and caches of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **private_caches(Path(folder)), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run([sys.executable, "-m", "suite.cold", provider, workload, label], env=env, timeout=TIMEOUT,
                                  cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {TIMEOUT} s"}
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:500]}


def main(argv: list[str]) -> int:
    provider, name, *label = argv
    (workload,) = select(name)
    start = time.perf_counter()
    made = provider_table.get(provider)
    chosen = label[0] if label else made.labels(workload)[0]
    imported = time.perf_counter() - start
    print(json.dumps({**compile_one(provider, workload, chosen), "import_seconds": imported}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
