"""Every example: on the GPU in real sizes if there is one, else on the CPU in small ones.

    python examples/run_all.py                          all of them
    python examples/run_all.py --only gemm,attention    families or files whose names contain one of these
    python examples/run_all.py --jobs 4 --out benchmarks/results

Each example runs in a process of its own with a time limit: one that fails or hangs costs only itself.  References and
compilers run beside each other; once all have finished, kernels are timed one example after another, with nothing else
on the GPU.  A time is the median over runs with a flushed L2 cache; TFLOP/s counts products, GB/s each tensor once.
--out writes the table as JSON.  Exits with status 1 if an example is wrong or gave no result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

from checks import CHECKS, EXAMPLES, Check
from measuring import figures
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SM90A = {"kind": "cuda", "arch": "sm_90a"}


@dataclass
class Row:
    """One check.  state: ok, wrong, failed (an exception), stopped (over its time limit) or lost (the process ended)."""

    example: str
    function: str
    sizes: dict[str, Any]
    target: Any = "auto"
    backend: str | None = None
    state: str = "lost"
    error: str = ""
    seconds: float = 0.0
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def worst(self) -> dict[str, Any] | None:
        """The comparison that comes nearest to its bound."""
        return max(self.comparisons, key=lambda c: (not c["ok"], share(c)), default=None)


def share(c: dict[str, Any]) -> float:
    """Error as a part of its bound."""
    return c["error"] / c["bound"] if c["bound"] else (0.0 if c["error"] == 0 else math.inf)


class Example:
    """The process of one example file."""

    def __init__(self, file: str, rows: list[Row], threads: int, measure: bool) -> None:
        self.file, self.rows, self.measure = file, rows, measure
        self.threads, self.lines = threads, queue.Queue[str | None]()
        self.process: subprocess.Popen[str] | None = None
        self.log = tempfile.TemporaryFile("w+")

    def start(self) -> None:
        rows = [{"function": r.function, "sizes": r.sizes, "target": r.target, "backend": r.backend} for r in self.rows]
        threads = str(self.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
               "TILELANG_PRINT_ON_COMPILATION": "0"}
        command = [sys.executable, str(EXAMPLES / "run_one.py"), self.file, json.dumps(rows)]
        self.process = subprocess.Popen(command + ["--measure"] * self.measure, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, env=env, start_new_session=True)
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.lines.put(line)
        self.lines.put(None)

    def follow(self, limit: float) -> None:
        """Take results until the process waits or ends; after `limit` seconds it is ended."""
        deadline, at = time.monotonic() + limit, -1
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for row in self.rows[max(at, 0):]:
                    if row.state == "lost":
                        row.state, row.error = "stopped", f"no result within {limit:.0f} s"
                self.end()
                return
            if line is None:
                self._lost()
                return
            if not line.startswith("@"):
                continue
            facts = json.loads(line[1:])
            at = facts.get("starts", at)
            if "idle" in facts:
                return
            self._enter(facts)

    def _enter(self, facts: dict[str, Any]) -> None:
        for state in ("checked", "failed", "timed"):
            if state not in facts:
                continue
            row = self.rows[facts[state]]
            if state == "timed":
                row.calls, row.error = facts["calls"], facts.get("error", row.error)
                return
            row.seconds = facts["seconds"]
            if state == "failed":
                row.state, row.error = "failed", facts["error"]
            else:
                row.sizes, row.comparisons = facts["sizes"], facts["comparisons"]
                row.state = "ok" if all(c["ok"] for c in row.comparisons) else "wrong"

    def _lost(self) -> None:
        self.end()
        self.log.seek(0)
        said = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        for row in self.rows:
            if row.state == "lost":
                row.error = said[-1][:300] if said else "the process ended without a word"

    def time(self, limit: float) -> None:
        """Let a waiting process time its kernels."""
        if self.process is None or self.process.poll() is not None or not self.measure:
            return
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            pass
        self.follow(limit)
        self.end()

    def end(self) -> None:
        """End the process and what it started."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()


def run(examples: list[Example], jobs: int, limit: float, timing_limit: float, done: Callable[[Example], None]) -> None:
    """Checks of all examples, `jobs` at a time, then the times of each alone.  done: called when one's checks are over."""
    def check(example: Example) -> None:
        example.start()
        example.follow(limit)
        if not example.measure:
            example.end()
        done(example)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(check, examples))
        for example in examples:
            example.time(timing_limit)
    finally:
        for example in examples:
            example.end()


def gpu() -> str | None:
    """The name of the GPU that examples run on, or None."""
    from harness import HERE

    if not HERE.on_gpu:
        return None
    import torch

    return str(torch.cuda.get_device_name())


def rows_of(checks: list[Check], on_gpu: bool, has_hopper: bool) -> dict[str, list[Row]]:
    """Rows of each file, real sizes on a GPU."""
    found: dict[str, list[Row]] = {}
    for c in checks:
        row = Row(c.file, c.function, dict(c.real if on_gpu else c.small))
        if c.hopper and not has_hopper:
            row.sizes, row.target, row.backend = dict(c.small), SM90A, "simulator"
        found.setdefault(c.file, []).append(row)
    return found


def table(rows: list[Row]) -> Table:
    """What is printed at the end."""
    t = Table(title="examples", title_justify="left")
    columns: tuple[tuple[str, dict[str, Any]], ...]
    columns = (("example", {}), ("sizes", {"overflow": "fold", "max_width": 44}), ("error / bound", {}),
               ("kernel", {"justify": "right"}), ("rate", {"justify": "right"}), ("torch", {}))
    for name, options in columns:
        t.add_column(name, **options)
    for row in rows:
        name = f"{row.example.removesuffix('.py')} {row.function.removeprefix('check').removeprefix('_')}".strip()
        sizes = ", ".join(f"{k}={v}" for k, v in row.sizes.items() if k not in ("seed", "show"))
        worst = row.worst
        if row.state in ("ok", "wrong") and worst is not None:
            text = f"{worst['error']:.2g} / {worst['bound']:.2g}" if worst["bound"] else \
                ("exact" if worst["error"] == 0 else f"{worst['error']:.2g}, must be 0")
        else:
            text = f"{row.state}: {row.error}"
        text = escape(text) if row.state == "ok" else f"[bold red]{escape(text)}[/]"
        for k, (ms, rate, peer) in enumerate([figures(c) for c in row.calls] or [("", "", "")]):
            t.add_row(*((escape(name), escape(sizes), text) if k == 0 else ("", "", "")), ms, rate, escape(peer))
    return t


def record(rows: list[Row], device: str | None, seconds: float) -> dict[str, Any]:
    """The table with the machine it was made on, as JSON."""
    import tilelang

    machine = {"gpu": device, "cpus": os.cpu_count(), "python": platform.python_version(), "tilelang": tilelang.__version__}
    if device is not None:
        import torch

        machine |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "machine": machine, "seconds": round(seconds, 1), "rows": [asdict(r) for r in rows]}


def main() -> int:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cpus = len(os.sched_getaffinity(0))
    p.add_argument("--only", default="", help="comma-separated parts of file names")
    p.add_argument("--jobs", type=int, default=max(1, min(12, cpus)), help="examples at a time (default %(default)s)")
    p.add_argument("--limit", type=float, default=0.0, help="seconds an example's checks may take (80 on a GPU, else 600)")
    p.add_argument("--no-times", action="store_true", help="check only")
    p.add_argument("--out", default="", help="folder for DATE-DEVICE-examples.json")
    options = p.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    device = gpu()
    has_hopper = device is not None and _has_hopper()
    wanted = [w for w in options.only.split(",") if w]
    groups = rows_of([c for c in CHECKS if not wanted or any(w in c.file for w in wanted)], device is not None, has_hopper)
    measure = device is not None and not options.no_times
    examples = [Example(file, rows, max(1, cpus // options.jobs), measure) for file, rows in groups.items()]
    examples.sort(key=lambda e: -len(e.rows))  # the longest first
    console.print(f"{len(examples)} examples on {device or 'the CPU, small sizes'}, {options.jobs} at a time")
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("examples", total=len(examples))

        def done(example: Example) -> None:
            progress.advance(task)
            states = {r.state for r in example.rows}
            took = sum(r.seconds for r in example.rows)
            if states != {"ok"} or not progress.live.is_started:
                progress.console.print(f"{escape(example.file)}: {', '.join(sorted(states))} ({took:.1f} s)")

        run(examples, options.jobs, options.limit or (80.0 if device else 600.0), 20.0, done)
    rows = [r for file in groups for r in groups[file]]
    console.print(table(rows))
    seconds = time.monotonic() - start
    good = sum(r.state == "ok" for r in rows)
    console.print(f"{good} of {len(rows)} checks agree with their references, {seconds:.0f} s")
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        short = (device or "cpu").lower().removeprefix("nvidia ").replace(" ", "-")
        path = folder / f"{datetime.date.today().isoformat()}-{short}-examples.json"
        path.write_text(json.dumps(record(rows, device, seconds), indent=1) + "\n")
        console.print(f"wrote {path}")
    return 0 if good == len(rows) else 1


def _has_hopper() -> bool:
    from tilelang.target import determine_target

    return bool(determine_target("auto", return_object=True).has_wgmma)


if __name__ == "__main__":
    sys.exit(main())
