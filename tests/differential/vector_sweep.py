"""Runs many forms of programs whose accesses become vectors (vector_forms.py), each compared with NumPy.

    python tests/differential/vector_sweep.py --forms 5000 --record benchmarks/results/DATE-vector-forms.json
    python tests/differential/vector_sweep.py --on gpu --forms 400        # needs a CUDA device
    python tests/differential/vector_sweep.py --show 17 --seed 1          # one form, on all executions here
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests" / "differential"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from vector_forms import AGREES, FAILED, draw, outcomes, program  # noqa: E402

HERE = ("sm_90a", "sm_80", "cpu")


def _one(job: tuple[int, int, tuple[str, ...]]) -> tuple[int, dict[str, tuple[str, str]]]:
    seed, number, executions = job
    return number, outcomes(draw(seed, number), executions, number)


def _compiled(job: tuple[int, int, str]) -> None:
    """Compile a form into the disk cache.  What fails here fails again, and is reported, at the launch."""
    import tilelang

    seed, number, target = job
    form = draw(seed, number)
    try:
        kernel = tilelang.compile(program(form), target=target)
        if target == "cuda" and (form.shift or form.symbolic):
            assert kernel.unaligned  # which the call would compile
    except Exception:
        pass


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def run_here(seed: int, numbers: Iterable[int], executions: tuple[str, ...], workers: int) -> Iterable[Any]:
    """(number, outcomes) of each form, as they end."""
    jobs = [(seed, k, executions) for k in numbers]
    if workers == 1:
        yield from map(_one, jobs)
        return
    with _pool(workers) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_one, j) for j in jobs]):
            yield done.result()


def run_compiled(seed: int, numbers: Iterable[int], target: str, workers: int) -> Iterable[Any]:
    """Compile all forms in parallel, then launch one after another in a process that a fault of the device may end."""
    numbers = list(numbers)
    began = time.time()
    with _pool(workers) as pool:
        list(pool.map(_compiled, [(seed, k, target) for k in numbers], chunksize=2))
    print(f"compiled in {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    launcher = _pool(1)
    for k in numbers:
        try:
            number, found = launcher.submit(_one, (seed, k, (target,))).result()
        except concurrent.futures.process.BrokenProcessPool:
            number, found = k, {target: (FAILED, "the process ended")}
        yield number, found
        if any(s == FAILED and "differ" not in text for s, text in found.values()):
            launcher.shutdown()  # after a fault on the device every later call of the process fails too
            launcher = _pool(1)
    launcher.shutdown()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--forms", type=int, default=300)
    p.add_argument("--first", type=int, default=0, help="number of the first form")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("-n", "--workers", type=int, default=os.cpu_count() or 1, help="processes")
    p.add_argument("--on", default="here", help="here (simulators of sm_90a and sm_80, CPU), gpu, or names separated by commas")
    p.add_argument("--record", type=pathlib.Path, help="write the counts to this file")
    p.add_argument("--log", type=pathlib.Path, help="add a line for each form that is wrong or refused to this file")
    p.add_argument("--show", type=int, help="run only the form of this number, and print it")
    a = p.parse_args()
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    executions = {"here": HERE, "gpu": ("cuda",)}.get(a.on) or tuple(a.on.split(","))
    if a.show is not None:
        form = draw(a.seed, a.show)
        print(form, outcomes(form, executions, a.show), sep="\n")
        return 0
    began = time.time()
    counts, kinds = collections.Counter[str](), collections.Counter[str]()
    wrong: list[dict[str, Any]] = []
    git = shutil.which("git")  # an archive has no commit, and a machine may lack git
    head = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() if git else ""
    out: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": head,
                           "command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(), "seed": a.seed}
    if a.on == "gpu":
        import torch

        out["gpu"] = torch.cuda.get_device_name()

    def record(forms: int) -> None:
        out.update(forms=forms, wrong=len(wrong), seconds=round(time.time() - began, 1), runs=dict(sorted(counts.items())),
                   of_each_kind=dict(sorted(kinds.items())))
        if a.record:
            a.record.write_text(json.dumps(out, indent=1) + "\n")

    numbers = range(a.first, a.first + a.forms)
    results = run_compiled(a.seed, numbers, "cuda", a.workers) if a.on == "gpu" else \
        run_here(a.seed, numbers, executions, a.workers)
    for done, (number, found) in enumerate(results, 1):
        form = draw(a.seed, number)
        kinds[f"{form.fill} {form.leave}"] += 1
        for name, (status, text) in found.items():
            counts[f"{name} {status}"] += 1
            if status != AGREES:
                row = {"number": number, "execution": name, "status": status, "text": text, "form": asdict(form)}
                if a.log:
                    with a.log.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                if status == FAILED:
                    wrong.append(row)
                    print(f"{number} {name}: {text}\n    {form}", flush=True)
        if done % 100 == 0:
            record(done)
            print(f"{done} of {a.forms} in {time.time() - began:.0f} s, {len(wrong)} wrong", file=sys.stderr, flush=True)
    record(a.forms)
    print(json.dumps({k: v for k, v in out.items() if k != "of_each_kind"}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
