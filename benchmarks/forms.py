"""Products of other types and forms beside torch: tf32, int8, float8, batched, grouped, with epilogues.

    python benchmarks/forms.py                         # everything (about a minute on an H200)
    python benchmarks/forms.py --only tf32,batched     # groups, or parts of names ("nn 4096")
    python benchmarks/forms.py --list

All kernels are compiled first, by several processes; each result is compared with float64 (whole rows and columns) before
anything is timed; then ours and torch's calls take turns in bursts after idling.  Times are the least of the rounds' medians.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


def chosen(text: str) -> list[str]:
    """Names of forms: of groups, or that contain a part of the text."""
    from suite.forms import FORMS

    words = [w.strip() for w in text.split(",") if w.strip()]
    return [n for n, (group, _) in FORMS.items() if not words or any(w == group or w in n for w in words)]


def compile_one(name: str) -> str:
    """In a worker: the first call, which leaves the kernel in the disk cache.  What went wrong, or ""."""
    import torch
    from suite.forms import FORMS, make, ours

    try:
        f = FORMS[name][1]
        ours(f, make(f))()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # others need the memory
    except Exception as e:
        return f"{name}: {type(e).__name__}: {str(e).splitlines()[0][:200]}"
    return ""


def compile_all(names: list[str], workers: int) -> None:
    if workers < 2:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for problem in filter(None, pool.map(compile_one, names)):
            print("compile", problem, flush=True)


def measure(name: str, rounds: int, ms: float, idle: float) -> dict[str, Any]:
    """One row: accuracy and times of everybody who computes the form."""
    import torch
    from suite.forms import FORMS, accuracy, make, ours, peers, reference
    from suite.measuring import CudaMeter

    group, f = FORMS[name]
    t, meter = make(f), CudaMeter(idle)
    parts = reference(f, t)
    row: dict[str, Any] = {"name": name, "group": group, "flops": f.flops}
    calls, ready = {"ours": ours(f, t), **peers(f, t)}, {}
    for who, call in calls.items():
        try:
            worst, relative = accuracy(parts, call())
            row[who] = {"of_bound": worst, "relative": relative}
            if who != "ours" or worst <= 1.0:
                ready[who] = meter.prepare(call)
                row[who].update(timing=ready[who].how, host_us=ready[who].host_us)
        except Exception as e:
            row[who] = {"error": f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"}
            torch.cuda.synchronize()
    # Launches from a stream take longer, or the host longer than the device: a row is timed in one way.
    if any(p.how == "graph" or (p.host_us or 0.0) > 0.8e3 * p.each_ms for p in ready.values()):
        ready = {who: meter.prepare(calls[who], math.inf) if p.how == "stream" else p for who, p in ready.items()}
        row.update({who: {**row[who], "timing": p.how} for who, p in ready.items()})
    order = list(ready)
    times: dict[str, list[float]] = {who: [] for who in ready}
    for r in range(rounds):
        for who in order[r % len(order):] + order[:r % len(order)] if order else []:
            times[who].append(meter.window(ready[who], ms).ms * 1e3)
    for who, found in times.items():
        row[who].update(us=median(found), all=found)
    return row


def line(row: dict[str, Any]) -> str:
    """name, our microseconds and rate, for each peer its time, error and the ratio to it."""
    mine = row["ours"]
    others = {k: v["us"] for k, v in row.items() if isinstance(v, dict) and k != "ours" and "us" in v}
    text = f"{row['name']:40s}"
    if "us" in mine:
        text += f" {mine['us']:9.1f} us {row['flops'] / mine['us'] * 1e-6:6.0f} TFLOP/s"
        text += f" of bound {mine['of_bound']:.2f}, relative {mine['relative']:.1e}"
    elif "of_bound" in mine:
        text += f" WRONG of bound {mine['of_bound']:.3g}, relative {mine['relative']:.2e}"
    else:
        text += f" FAILED {mine['error']}"
    for who, us in sorted(others.items(), key=lambda x: x[1]):
        text += f" | {who} {us:9.1f} us {row[who]['relative']:.1e}" + (f" ratio {us / mine['us']:.3f}" if "us" in mine else "")
    for who, v in row.items():
        if isinstance(v, dict) and who != "ours" and "error" in v:
            text += f" | {who}: {v['error'][:60]}"
    return text


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--ms", type=float, default=6.0, help="of a window")
    p.add_argument("--idle", type=float, default=0.03)
    p.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    p.add_argument("--budget-seconds", type=float, default=600.0)
    p.add_argument("--json", default="")
    p.add_argument("--list", action="store_true")
    o = p.parse_args()
    begin, names = time.time(), chosen(o.only)
    if o.list:
        print("\n".join(names))
        return 0
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    compile_all(names, o.workers)
    print(f"{len(names)} forms, compiled after {time.time() - begin:.1f} s, {torch.cuda.get_device_name()}", flush=True)
    rows, wrong = [], 0
    for name in names:
        if time.time() - begin > o.budget_seconds:
            print("no time for", name, flush=True)
            continue
        rows.append(measure(name, o.rounds, o.ms, o.idle))
        wrong += "us" not in rows[-1]["ours"]
        print(line(rows[-1]), flush=True)
        if o.json:
            Path(o.json).write_text(json.dumps(rows, indent=1))
    print(f"{time.time() - begin:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
